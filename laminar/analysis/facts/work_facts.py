"""Facts about work: events, decisions, trajectories, their placements and turns, groups.

Reads   Happenings of a replay
Gives   MessageFacts, TrajectoryFacts: parts of the collector
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from laminar.analysis.facts.happening import Add, Happening, Row
from laminar.analysis.facts.idle_reasons import source_of
from laminar.analysis.facts.trajectory_history import (
    HistoryTracker,
    Placement,
    Stage,
    TrajectoryHistory,
)
from laminar.analysis.log.display import step_number
from laminar.analysis.log.event_clock import EventClock, Moment
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import get_tag
from laminar.events.reasons import FinishReason, PullPurpose
from laminar.names.ids import GroupId, TrajectoryId

_encode = msgspec.json.Encoder().encode


class MessageFacts:
    """Tables `events` and `decisions`."""

    def __init__(self, add: Add) -> None:
        self._add = add

    def record(self, at: Happening) -> None:
        stamped, seq = at.stamped, at.stamped.seq
        sender = (stamped.peer, stamped.incarnation, get_tag(at.event))
        self._add("events", (seq, at.seconds, *sender, _encode(at.event).decode()))
        for number, command in enumerate(at.commands):
            order = (get_tag(command), command.to, _encode(command).decode())
            self._add("decisions", (seq, number, at.seconds, *order))


class TrajectoryFacts:
    """Tables `trajectories`, `placements`, `updates`, `turns`, `groups`."""

    def __init__(self, add: Add, clock: EventClock, lives: HistoryTracker) -> None:
        self._add, self._clock, self._lives = add, clock, lives
        self._moves = MoveReasons(lives)
        self._complete: dict[GroupId, Moment] = {}
        self._mixed: set[GroupId] = set()

    def record(self, at: Happening) -> None:
        self._moves.watch(at)
        for what, life in at.changes:
            if what == Stage.DISPATCHED:
                self._moves.explain(life, at)
            elif what == Stage.UPDATED:
                self._add_update(life, at)
            elif what == Stage.ENDED:
                self._add("trajectories", self._trajectory_row(life))
            if what == Stage.FINISHED:
                self._add_turn(life)
            if what in (Stage.FINISHED, Stage.TURN, Stage.LOST, Stage.ENDING):
                self._add_placement(life, at)
            if what == Stage.ENDING:
                group = at.state.work.groups.get(life.group)
                if group is not None and group.mixed:
                    self._mixed.add(life.group)
        ended = (life.group for what, life in at.changes if what == Stage.ENDED)
        for name in dict.fromkeys(ended):
            self._close_group(name, at.state)
        if at.state.work.ready and not isinstance(at.event, _MAKE_NO_GROUP_READY):
            for ready in at.state.work.ready:
                self._complete.setdefault(ready, at.now)

    def list_open(self) -> Iterator[tuple[str, Row]]:
        for life in self._lives.open.values():
            yield "trajectories", self._trajectory_row(life)
            if life.placement.left is None:
                yield "placements", self._placement_row(life, life.placement)
        for group in self._complete:
            yield "groups", self._group_row(group)

    def _close_group(self, group: GroupId, state: State) -> None:
        if group not in state.work.groups:
            self._add("groups", self._group_row(group))
            self._complete.pop(group, None)
            self._mixed.discard(group)

    def _group_row(self, group: GroupId) -> Row:
        return (group, *self._clock.place(self._complete.get(group)), group in self._mixed)

    def _add_update(self, life: TrajectoryHistory, at: Happening) -> None:
        moment, version = life.placement.updates[-1]
        stay = (life.trajectory_id, life.placement.number, life.placement.replica)
        self._add("updates", (*stay, version, *self._clock.place(moment)))

    def _add_turn(self, life: TrajectoryHistory) -> None:
        p, place = life.placement, self._clock.place
        self._add(
            "turns",
            (
                *(life.trajectory_id, life.turns, p.replica, p.version),
                *place(life.requested),
                *place(p.dispatched),
                *place(p.started),
                *place(life.finished),
                *(life.num_tokens, life.finish_reason),
            ),
        )

    def _add_placement(self, life: TrajectoryHistory, at: Happening) -> None:
        """Add the placement that this event ended."""
        ended = [p for p in life.placements[-2:] if p.left == at.now]
        for placement in ended[-1:]:
            if not placement.recorded:
                placement.recorded = True
                self._add("placements", self._placement_row(life, placement))

    def _placement_row(self, life: TrajectoryHistory, p: Placement) -> Row:
        return (
            *(life.trajectory_id, p.number, life.purpose, p.replica, p.version, p.step, p.attempt),
            p.turn,
            *self._clock.place(p.dispatched),
            *self._clock.place(p.started),
            *(p.tokens_resumed, p.prompt_tokens),
            *self._clock.place(p.left),
            *(p.left_how or None, p.moved_because or None, p.moved_from or None),
        )

    def _trajectory_row(self, life: TrajectoryHistory) -> Row:
        p, place = life.placement, self._clock.place
        trained = life.end == "trained"
        step = step_number(life.end_step) if trained else life.end_step
        oldest = next(stay.step for stay in life.placements if stay.attempt == p.attempt)
        return (
            *(life.trajectory_id, life.group, life.sibling, life.purpose, life.row_index),
            *(p.replica, p.version, p.step, p.attempt, p.number, life.turns, p.prompt_tokens),
            *place(life.placements[0].dispatched),
            *place(p.started),
            *place(life.finished),
            life.scorer or None,
            *place(life.scoring),
            *place(life.rewarded),
            *place(life.chosen),
            *place(life.ending),
            *place(life.ended),
            *(life.num_tokens, life.tokens_lost, life.finish_reason or None, life.ended_by or None),
            life.ended_by or (FinishReason.LENGTH if _was_cut(life) else None),
            *(life.reward, life.correct, life.reward_reason or None),
            *(life.end or None, life.end_reason or None),
            step if life.end and step >= 0 else None,
            life.end_step - oldest if trained else None,
        )


_MAKE_NO_GROUP_READY = (ev.TokenProgress, ev.TrajectoryStarted, ev.TrajectoryFinished)


def _was_cut(life: TrajectoryHistory) -> bool:
    return life.finished is not None and life.finish_reason == FinishReason.LENGTH


class MoveReasons:
    """Reasons why lost work was placed where it was."""

    def __init__(self, lives: HistoryTracker) -> None:
        self._lives = lives
        self._waited: set[TrajectoryId] = set()  #: lost work whose wait for its version timed out
        self._restarted: set[TrajectoryId] = set()  #: lost work that a batch gave up on
        #: latest order to load weights for lost work: version, event and text, by replica
        self._sources: dict[str, tuple[int, int, str]] = {}

    def watch(self, at: Happening) -> None:
        """Note timeouts of lost work, and the sources of its versions."""
        if isinstance(at.event, ev.TimerFired):
            self._watch_timer(at.event.timer, at.state)
        for order in at.commands:
            if not isinstance(order, cmd.PullWeights) or order.purpose != PullPurpose.RESUME:
                continue
            if found := source_of(at.state, order):
                when = at.clock.format_time(at.now)
                text = f"At {when} {order.to} was ordered to load v{order.version}{found}."
                self._sources[order.to] = (order.version, at.now.seq, text)

    def _watch_timer(self, timer: str, state: State) -> None:
        if timer == keys.BATCH_TIMEOUT:
            lost = (state.work.trajectories.get(name) for name in state.work.lost)
            self._restarted |= {t.id for t in lost if t is not None and t.restart}
        elif timer.startswith(_RESUME):
            self._waited.add(TrajectoryId(timer.removeprefix(_RESUME)))

    def explain(self, life: TrajectoryHistory, at: Happening) -> None:
        """Note why the latest placement followed, if it is a move, and whence its weights came."""
        if len(life.placements) < 2:
            return
        before, after = life.placements[-2:]
        waited = life.trajectory_id in self._waited
        restarted = life.trajectory_id in self._restarted or (
            isinstance(at.event, ev.TimerFired) and at.event.timer == keys.BATCH_TIMEOUT
        )
        self._waited.discard(life.trajectory_id)
        self._restarted.discard(life.trajectory_id)
        if before.left is None or before.left_how not in ("lost", "released"):
            return
        if after.attempt == before.attempt:
            version, seq, text = self._sources.get(after.replica, (-1, -1, ""))
            if version == after.version and seq >= before.left.seq:
                after.moved_from = text
        after.moved_because = _word_reason(before, after, restarted, waited, at.state)


_RESUME = keys.resume_timer(TrajectoryId(""))


def _word_reason(
    before: Placement, after: Placement, restarted: bool, waited: bool, state: State
) -> str:
    if before.left_how == "released":
        return (
            f"{before.replica} ran only a few long responses and could take new work with newer "
            f"weights, and {after.replica} had v{after.version} and room for it (repack)"
        )
    if after.attempt == before.attempt:
        return f"{after.replica} had its version v{after.version} and room for it"
    if restarted:
        wait_s = state.settings.batch_timeout_ms / 1000
        return f"a batch had waited {wait_s:g} s (trainer.batch_timeout_s) for it"
    if waited:
        wait_s = state.settings.resume_timeout_ms / 1000
        return (
            f"no replica with v{before.version} had room for it within {wait_s:g} s "
            "(recovery.resume_timeout_ms)"
        )
    return f"the relay no longer had v{before.version}, and no replica with room served it"
