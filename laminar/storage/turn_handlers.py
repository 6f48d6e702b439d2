"""The requests of environments: calls that are to be made, and answers to turns.

Reads   typed requests (`messages`) and the rows they name (`tables`)
Writes  rows, contexts and effects, inside the transaction of the caller
Gives   TurnHandlers, a part of Handlers; what replies are made of: effect_item, result_of

Two request types of their own with the two tables of turn_tables.py; handlers.py has all others.
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
    """Over the rows of one store."""

    def __init__(self, rows: Tables) -> None:
        self._rows = rows

    def intend(self, request: m.Intend) -> m.IntendReply:
        row = self._rows.row(request.trajectory_id)
        known = self._rows.turns.effects(row, request.turn) if row is not None else []
        asked = _stored(request.owner, request.effects)
        verdict = rules.judge_intend(row, request.placement, request.turn, known, asked)
        if row is not None and verdict.changes:
            for effect in asked:
                self._rows.turns.add_effect(row, request.turn, effect)
        return m.IntendReply(results=(result_of(request.trajectory_id, verdict),))

    def go_on(self, request: m.Continue) -> m.ContinueReply:
        return m.ContinueReply(results=tuple(map(self._go_on, request.items)))

    def _go_on(self, item: m.ContextItem) -> m.Result:
        row, stored = self._rows.row(item.trajectory_id), None
        if row is not None and row.end is None:
            stored = self._rows.turns.contexts(row).get(item.turn)
        verdict = rules.judge_context(row, item.placement, item.turn, item.tokens, stored)
        if row is not None and verdict.changes:
            self._rows.turns.add_context(row.id, item.turn, item.tokens)
            self.end_effects(row, item.turn - 1, item.effects)
            self._rows.save(row, rules.continued(row, item.turn, item.tokens))
        return result_of(item.trajectory_id, verdict)

    def end_effects(self, row: Row, turn: int, effects: Sequence[m.EffectItem]) -> None:
        """How the calls of a turn have ended."""
        for effect in _stored("", effects):
            self._rows.turns.add_effect(row, turn, effect)


def result_of(trajectory_id: str, verdict: rules.Verdict) -> m.Result:
    return m.Result(trajectory_id=trajectory_id, answer=verdict.answer, reason=verdict.reason)


def effect_item(effect: StoredEffect) -> m.EffectItem:
    """The same in a reply, which does not name its owner."""
    fields = effect._asdict()
    del fields["owner"]
    return msgspec.convert(fields, m.EffectItem)


def _stored(owner: str, effects: Sequence[m.EffectItem]) -> list[StoredEffect]:
    return [
        StoredEffect(owner, e.call, e.tool, e.arguments, e.status, e.result, e.seconds)
        for e in effects
    ]
