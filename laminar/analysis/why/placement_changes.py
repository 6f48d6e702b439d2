"""Report on why a trajectory moved, and why repack left it in place.

Lists every placement after its first, with the events that caused it.

Reads   a replay
Gives   PlacementChanges, an observer that ends with sentences
Raises  ConfigError for a trajectory that the log does not have
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from laminar.analysis.log.display import step_number
from laminar.analysis.facts.trajectory_history import (
    EventClock,
    HistoryTracker,
    Placement,
    Stage,
    TrajectoryHistory,
)
from laminar.analysis.report.repack_book import was_given_away
from laminar.analysis.why import repack_decisions
from laminar.analysis.why.idle_spells import source_of
from laminar.analysis.why.wording import QUESTION_HINT, describe_event, format_times
from laminar.config import ConfigError
from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.reasons import PullPurpose
from laminar.names.ids import Purpose, TrajectoryId


class _PlacementChange(NamedTuple):
    """Placement after the first."""

    lost: Stamped
    placed: Stamped
    before: Placement
    after: Placement
    reason: str
    source: str  #: of its version, if its new replica was ordered to load that for resumed work


class PlacementChanges:
    """Placements of one trajectory after the first."""

    def __init__(self, name: TrajectoryId) -> None:
        self.name = name
        self._moments, self._lives = EventClock(), HistoryTracker()
        self._life: TrajectoryHistory | None = None
        self._first: Stamped | None = None
        self._lost: Stamped | None = None
        self._turn: Stamped | None = None  #: end of the turn after which it is placed again
        self._turns: list[str] = []  #: turns that followed on another replica
        self._restart = self._waited = False  #: since it was lost
        self._sources: dict[str, str] = {}  #: since it was lost, by the replica loading its version
        self._moves: list[_PlacementChange] = []
        self._again = ""  #: id under which an evaluation repeated it
        self._looks = repack_decisions.RepackDecisions()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self._moments.locate_event(stamped)
        for what, life in self._lives.record_event(now, stamped.event, commands, state):
            if life.trajectory_id == self.name:
                self._life = life
                self._record_change(what, life, stamped, state)
            elif what == Stage.DISPATCHED and self._is_repeated_by(life):
                self._again = self._again or life.trajectory_id
        if self._lost is not None:
            self._watch_lost_work(stamped, state)
            self._note_sources(commands, state)
        trajectory = state.work.trajectories.get(self.name)
        if trajectory is not None:
            self._looks.record_event(now, stamped, commands, state, {trajectory.replica})

    def _record_change(
        self, what: str, life: TrajectoryHistory, stamped: Stamped, state: State
    ) -> None:
        if what == Stage.TURN:
            self._turn = stamped
        elif what == Stage.LOST:
            self._lost, self._restart, self._waited = stamped, False, False
            self._sources = {}
            self._watch_lost_work(stamped, state)
        elif what == Stage.DISPATCHED and self._lost is None:
            self._first = self._first or stamped
            self._note_turn(life, stamped)
        elif what == Stage.DISPATCHED and self._lost is not None:
            self._watch_lost_work(stamped, state)
            before, after = life.placements[-2:]
            self._restart = self._restart or _get_timer(stamped) == keys.BATCH_TIMEOUT
            reason = self._find_reason(before, after, state)
            source = self._sources.get(after.replica, "") * (after.attempt == before.attempt)
            self._moves.append(_PlacementChange(self._lost, stamped, before, after, reason, source))
            self._lost = None

    def _note_turn(self, life: TrajectoryHistory, stamped: Stamped) -> None:
        """Note a turn that follows on another replica."""
        before, after = life.placements[-2:] if self._turn is not None else (None, None)
        if before is not None and after is not None and before.replica != after.replica:
            when = self._moments.format_time(after.dispatched)
            self._turns.append(
                f"Turn {life.turns} ran on {after.replica} with v{after.version} from {when}, by "
                f"{describe_event(stamped)}."
            )
        self._turn = None

    def _watch_lost_work(self, stamped: Stamped, state: State) -> None:
        """Note whether a batch gave up on the lost work, and whether the resume timer fired."""
        trajectory = state.work.trajectories.get(self.name)
        self._restart = self._restart or (trajectory is not None and trajectory.restart)
        self._waited = self._waited or _get_timer(stamped) == keys.resume_timer(self.name)

    def _note_sources(self, commands: list[Command], state: State) -> None:
        """Note the sources of its version, other than the replicas' own relays."""
        version = self._life.placement.version if self._life is not None else -1
        for order in commands:
            if not isinstance(order, cmd.PullWeights) or order.purpose != PullPurpose.RESUME:
                continue
            if order.version == version and (found := source_of(state, order)):
                when = self._moments.format_time(self._moments.now)
                text = f"{order.to} was ordered to load v{version}{found}."
                self._sources[order.to] = f"At {when} {text}"

    def _find_reason(self, before: Placement, after: Placement, state: State) -> str:
        if self._lost is not None and was_given_away(self._lost):
            return (
                f"{before.replica} ran only a few long responses and could take new work with "
                f"newer weights, and {after.replica} had v{after.version} and room for it "
                "(repack)"
            )
        if after.attempt == before.attempt:
            return f"{after.replica} had its version v{after.version} and room for it"
        if self._restart:
            wait_s = state.settings.batch_timeout_ms / 1000
            return f"a batch had waited {wait_s:g} s (trainer.batch_timeout_s) for it"
        if self._waited:
            wait_s = state.settings.resume_timeout_ms / 1000
            return (
                f"no replica with v{before.version} had room for it within {wait_s:g} s "
                "(recovery.resume_timeout_ms)"
            )
        return f"the relay no longer had v{before.version}, and no replica with room served it"

    def _is_repeated_by(self, life: TrajectoryHistory) -> bool:
        """Return whether `life` repeats this lost evaluation sample, in a separate group."""
        mine = self._life
        if mine is None or mine.purpose != Purpose.EVAL or life.purpose != Purpose.EVAL:
            return False
        same = mine.group.partition("-")[0] == life.group.partition("-")[0]
        return same and life.placement.attempt > mine.placement.attempt

    def format_lines(self) -> Iterable[str]:
        life, first = self._life, self._first
        if life is None or first is None:
            raise ConfigError(f"the log has no trajectory {self.name}: {QUESTION_HINT}")
        begin = life.placements[0]
        moved = f"moved {format_times(len(self._moves))}" if self._moves else "never moved"
        yield f"{self.name} {moved}."
        yield (
            f"It was dispatched to {begin.replica} with v{begin.version} at "
            f"{self._moments.format_time(begin.dispatched)}, by {describe_event(first)}."
        )
        yield from self._update_lines(begin)
        for move in self._moves:
            yield from self._move_lines(move)
            yield from self._update_lines(move.after)
        yield from self._turns
        yield from self._end_lines(life)
        yield from self._stay_lines()

    def _update_lines(self, placement: Placement) -> Iterable[str]:
        for moment, version in placement.updates:
            yield (
                f"It continued with v{version}, loaded in flight by {placement.replica} at "
                f"{self._moments.format_time(moment)}."
            )

    def _stay_lines(self) -> Iterable[str]:
        """Yield why repack left it in place while its replica was a straggler."""
        looks = [
            look
            for found in self._looks.of.values()
            for look in found
            if self.name in look.running
            and look.reason not in (repack_decisions.EMPTIED, *repack_decisions.NOT_STRAGGLING)
        ]
        if looks:
            yield (
                f"Repack found its replica straggling but left it there {format_times(len(looks))}:"
            )
            yield from repack_decisions.look_lines(looks, self._moments)

    def _move_lines(self, move: _PlacementChange) -> Iterable[str]:
        at, before, after = self._moments.format_time, move.before, move.after
        assert before.left is not None
        yield f"Placement {after.number}:"
        how = "released it" if was_given_away(move.lost) else "lost it"
        yield f"  {before.replica} {how} at {at(before.left)}: {describe_event(move.lost)}."
        if move.source:
            yield f"  {move.source}"
        waited_s = (after.dispatched.unix_ns - before.left.unix_ns) / 1e9
        if move.placed is move.lost:
            yield f"  {after.replica} got it at once, by the same event."
        else:
            yield (
                f"  {after.replica} got it {waited_s:.3f} s later, at {at(after.dispatched)}, by "
                f"{describe_event(move.placed)}."
            )
        if after.attempt > before.attempt:
            yield (
                f"  It restarted as attempt {after.attempt} with v{after.version}: {move.reason}."
            )
        else:
            yield f"  It resumed: {move.reason}. {self._describe_tokens(after)}"

    def _describe_tokens(self, placement: Placement) -> str:
        if placement.started is None:
            return "It did not start there."
        at = self._moments.format_time(placement.started)
        if not placement.tokens_resumed:
            return f"The store had no tokens of it yet, so the attempt began again at {at}."
        return f"It continued from {placement.tokens_resumed} stored tokens at {at}."

    def _end_lines(self, life: TrajectoryHistory) -> Iterable[str]:
        if life.finished is not None:
            turns = f" in {life.turns} turns" if life.turns > 1 else ""
            yield (
                f"It finished on {life.placement.replica} at "
                f"{self._moments.format_time(life.finished)} "
                f"with {life.num_tokens} tokens{turns} ({life.finish_reason})."
            )
        if life.ended_by:
            yield f"Its environment ended it ({life.ended_by}); the tokens so far were scored."
        if life.ending is None:
            yield f"At the end of the log it is {'lost' if self._lost else 'open'}."
            return
        how = f"{life.end} ({life.end_reason})" if life.end_reason else life.end
        step = f" by step {step_number(life.end_step)}" if life.end == "trained" else ""
        yield f"It ended as {how}{step} at {self._moments.format_time(life.ending)}."
        if self._again:
            yield f"The evaluation ran its prompt again as {self._again}."


def _get_timer(stamped: Stamped) -> str:
    return stamped.event.timer if isinstance(stamped.event, ev.TimerFired) else ""
