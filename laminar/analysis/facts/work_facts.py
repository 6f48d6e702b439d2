"""Facts about work: events, decisions, groups, and why trajectories moved.

Reads   Happenings of a replay
Gives   MessageFacts, MoveReasons, GroupFacts: parts of the collector
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.idle_reasons import source_of
from laminar.analysis.facts.tables import Add, DecisionRow, EventRow, GroupRow
from laminar.analysis.facts.trajectory_history import Stage, Stay, TrajectoryHistory
from laminar.analysis.log.event_clock import Moment, format_moment
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import get_tag
from laminar.events.reasons import PullPurpose
from laminar.names.ids import GroupId, TrajectoryId

_encode = msgspec.json.Encoder().encode


class MessageFacts:
    """Tables `events` and `decisions`."""

    def __init__(self, add: Add) -> None:
        self._add = add

    def record(self, at: Happening) -> None:
        stamped, seq, seconds = at.stamped, at.now.seq, at.now.seconds
        sender = (stamped.peer, stamped.incarnation, get_tag(at.event))
        self._add("events", EventRow(seq, seconds, *sender, _encode(at.event).decode()))
        for number, command in enumerate(at.commands):
            order = (get_tag(command), command.to, _encode(command).decode())
            self._add("decisions", DecisionRow(seq, number, seconds, *order))


class GroupFacts:
    """Table `groups`."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._complete: dict[GroupId, Moment] = {}
        self._mixed: set[GroupId] = set()

    def record(self, at: Happening) -> None:
        for what, life in at.changes:
            if what == Stage.ENDING:
                group = at.state.work.groups.get(life.group_id)
                if group is not None and group.mixed:
                    self._mixed.add(life.group_id)
        ended = (life.group_id for what, life in at.changes if what == Stage.ENDED)
        for name in dict.fromkeys(ended):
            if name not in at.state.work.groups:
                self._add("groups", self._describe_group(name))
                self._complete.pop(name, None)
                self._mixed.discard(name)
        if at.state.work.ready and not isinstance(at.event, _MAKE_NO_GROUP_READY):
            for ready in at.state.work.ready:
                self._complete.setdefault(ready, at.now)

    def list_open(self) -> Iterator[tuple[str, Any]]:
        for group in self._complete:
            yield "groups", self._describe_group(group)

    def _describe_group(self, group: GroupId) -> GroupRow:
        return GroupRow(group, self._complete.get(group), group in self._mixed)


_MAKE_NO_GROUP_READY = (ev.TokenProgress, ev.TrajectoryStarted, ev.TrajectoryFinished)


class MoveReasons:
    """Reasons why lost work was placed where it was."""

    def __init__(self) -> None:
        self._waited: set[TrajectoryId] = set()  #: lost work whose wait for its version timed out
        self._restarted: set[TrajectoryId] = set()  #: lost work that a batch gave up on
        #: latest order to load weights for lost work: version, event and text, by replica
        self._sources: dict[str, tuple[int, int, str]] = {}

    def record(self, at: Happening) -> None:
        """Note timeouts of lost work, the sources of its versions, and the reasons of moves."""
        if isinstance(at.event, ev.TimerFired):
            self._watch_timer(at.event.timer, at.state)
        for order in at.commands:
            if not isinstance(order, cmd.PullWeights) or order.purpose != PullPurpose.RESUME:
                continue
            if found := source_of(at.state, order):
                when = format_moment(at.now.seconds, at.now.seq)
                text = f"At {when} {order.to} was ordered to load v{order.version}{found}."
                self._sources[order.to] = (order.version, at.now.seq, text)
        for what, life in at.changes:
            if what == Stage.DISPATCHED and len(life.stays) > 1:
                self._explain(life, at)

    def _watch_timer(self, timer: str, state: State) -> None:
        if timer == keys.BATCH_TIMEOUT:
            lost = (state.work.trajectories.get(name) for name in state.work.lost)
            self._restarted |= {t.id for t in lost if t is not None and t.restart}
        elif timer.startswith(_RESUME):
            self._waited.add(TrajectoryId(timer.removeprefix(_RESUME)))

    def _explain(self, life: TrajectoryHistory, at: Happening) -> None:
        """Note why the latest placement followed, if it is a move, and whence its weights came."""
        before, after = life.stays[-2:]
        waited = life.trajectory in self._waited
        restarted = life.trajectory in self._restarted or (
            isinstance(at.event, ev.TimerFired) and at.event.timer == keys.BATCH_TIMEOUT
        )
        self._waited.discard(life.trajectory)
        self._restarted.discard(life.trajectory)
        if before.left_at is None or before.left_how not in ("lost", "released"):
            return
        if after.attempt == before.attempt:
            version, seq, text = self._sources.get(after.replica, (-1, -1, ""))
            if version == after.version and seq >= before.left_at.seq:
                after.moved_from = text or None
        after.moved_because = _word_reason(before, after, restarted, waited, at.state)


_RESUME = keys.resume_timer(TrajectoryId(""))


def _word_reason(before: Stay, after: Stay, restarted: bool, waited: bool, state: State) -> str:
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
