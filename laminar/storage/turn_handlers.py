"""Handlers of environment requests: intended calls, and answers to turns.

Reads   typed requests (`messages`) and the rows they name (`tables`)
Writes  rows, contexts and effects, inside the transaction of the caller
Gives   TurnHandlers, a part of Handlers; the parts of replies: effect_item, make_result

These two request types use the two tables of turn_tables.py; handlers.py has all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laminar.storage import messages as m
from laminar.storage import rules
from laminar.storage.rules import Row
from laminar.storage.tables import Tables
from laminar.storage.turn_tables import StoredEffect


class TurnHandlers:
    """Handlers of environment requests, over the rows of one store."""

    def __init__(self, rows: Tables) -> None:
        self._rows = rows

    def record_intent(self, request: m.Intend) -> m.IntendReply:
        row = self._rows.get_row(request.trajectory_id)
        known = self._rows.turns.get_effects(row, request.turn) if row is not None else []
        asked = _make_stored_effects(request.owner, request.effects)
        verdict = rules.judge_intend(row, request.placement, request.turn, known, asked)
        if row is not None and verdict.changes:
            for effect in asked:
                self._rows.turns.add_effect(row, request.turn, effect)
        return m.IntendReply(results=(make_result(request.trajectory_id, verdict),))

    def continue_trajectories(self, request: m.Continue) -> m.ContinueReply:
        return m.ContinueReply(results=tuple(map(self._continue_trajectory, request.items)))

    def _continue_trajectory(self, item: m.ContextItem) -> m.Result:
        row, stored = self._rows.get_row(item.trajectory_id), None
        if row is not None and row.end is None:
            stored = self._rows.turns.get_contexts(row).get(item.turn)
        parent = None if item.parent == item.turn - 1 else item.parent
        verdict = rules.judge_context(row, item.placement, item.turn, item.tokens, stored, parent)
        if row is not None and verdict.changes:
            options = item.options if item.options != m.TurnOptions() else None
            self._rows.turns.add_context(row.id, item.turn, item.tokens, parent, options)
            self.end_effects(row, item.turn - 1, item.effects)
            self._rows.save(row, rules.apply_context(row, item.turn, item.tokens))
        return make_result(item.trajectory_id, verdict)

    def end_effects(self, row: Row, turn: int, effects: Sequence[m.EffectItem]) -> None:
        """Store the outcomes of the calls of a turn."""
        for effect in _make_stored_effects("", effects):
            self._rows.turns.add_effect(row, turn, effect)


def make_result(trajectory_id: str, verdict: rules.Verdict) -> m.Result:
    return m.Result(trajectory_id=trajectory_id, answer=verdict.answer, reason=verdict.reason)


def effect_item(effect: StoredEffect) -> m.EffectItem:
    """Convert an effect for a reply, without its owner."""
    fields = effect._asdict()
    del fields["owner"]
    return msgspec.convert(fields, m.EffectItem)


def _make_stored_effects(owner: str, effects: Sequence[m.EffectItem]) -> list[StoredEffect]:
    return [
        StoredEffect(owner, e.call, e.tool, e.arguments, e.status, e.result, e.seconds)
        for e in effects
    ]
