"""Account of a run, from its event log: the trajectories issued, their ends and their rewards.

Reads   the events and commands of a replay
Gives   Account; `ledger_rows`, the closed ledger as a table; `ledger_problems`

The coordinator's ledger consists of a few counters. This book keeps the items behind them, one
entry per trajectory, to compare the counters, the store's rows and the trainer's record with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from laminar.core.context import COMMANDS_PER_EVENT_MAX
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.work import LedgerCounts
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.reasons import DropReason, EndKind, PullPurpose
from laminar.names.ids import GroupId, TrajectoryId

ANY_REASON = "for any reason"
ENDS = (EndKind.TRAINED, EndKind.EVALUATED, EndKind.DROPPED)
"""Ends by precedence: a group ends as the first of these that one of its trajectories has."""


class ClosedTrajectory(NamedTuple):
    """End that the store has confirmed."""

    ending: cmd.TrajectoryEnding
    num_tokens: int
    tokens_lost: int


class AttemptWeights(NamedTuple):
    """Weights of an attempt, and the number of completed steps that made them."""

    version: int
    step: int


@dataclass
class OrderedStep:
    """Batch given to the trainer, and the trainer's report."""

    command: cmd.TrainStep
    completed: ev.StepCompleted | None = None


class Account:
    """Account of a run, kept as a replay observer.

    Except for turns before the last, a trajectory is finished and rewarded once: its data is
    durable
    in the store and never replaced, so the first event counts and a repeated one says the same.
    """

    def __init__(self) -> None:
        self.issued: dict[TrajectoryId, str] = {}  #: purpose by trajectory
        self.groups: dict[GroupId, int] = {}  #: number of trajectories by group
        self.started: set[TrajectoryId] = set()  #: trajectories with a row in the store
        self.finished: dict[TrajectoryId, ev.TrajectoryFinished] = {}
        self.rewarded: dict[TrajectoryId, ev.TrajectoryRewarded] = {}
        self.commanded: dict[TrajectoryId, cmd.TrajectoryEnding] = {}
        self.closed: dict[TrajectoryId, ClosedTrajectory] = {}
        self.steps: dict[int, OrderedStep] = {}  #: latest order of each step
        #: every order, by step and version: an interrupted batch is ordered again
        self.orders: dict[tuple[int, int], cmd.TrainStep] = {}
        self.data: ev.DataLoaded | None = None
        #: weights of each attempt's first order, by attempt number
        self.stamps: dict[TrajectoryId, dict[int, AttemptWeights]] = {}
        #: replicas and versions that may have sampled it: by order to generate, or by order to load
        #: the version while running it
        self.sources: dict[TrajectoryId, set[tuple[str, int]]] = {}
        self.in_flight = False  #: whether versions may change during a trajectory
        self._asked: dict[int, tuple[cmd.TrajectoryEnding, ...]] = {}  #: by command id

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self.in_flight = state.settings.in_flight
        self._take_event(stamped.event, state)
        for index, command in enumerate(commands):
            self._take_command(command, stamped.seq * COMMANDS_PER_EVENT_MAX + index, state)

    def _take_event(self, event: object, state: State) -> None:
        if isinstance(event, ev.TrajectoryStarted):
            self.started.add(event.trajectory_id)
        elif isinstance(event, ev.TrajectoryFinished):
            self.finished.setdefault(event.trajectory_id, event)
        elif isinstance(event, ev.TurnRequested):
            finished = self.finished.get(event.trajectory_id)
            if finished is not None and finished.placement == event.placement:
                del self.finished[event.trajectory_id]  # the finish of a turn before the last
        elif isinstance(event, ev.TrajectoryRewarded):
            self.rewarded.setdefault(event.trajectory_id, event)
        elif isinstance(event, ev.TrajectoriesEnded):
            self._close(event, state)
        elif isinstance(event, ev.StepCompleted) and event.step_index in self.steps:
            step = self.steps[event.step_index]
            if (
                event.step_index < state.steps.completed
            ):  # else the run had failed, and dropped the batch
                step.completed = step.completed or event
        elif isinstance(event, ev.DataLoaded):
            self.data = event

    def _take_command(self, command: Command, command_id: int, state: State) -> None:
        if isinstance(command, cmd.GenerateTrajectory):
            stamp = AttemptWeights(command.version, command.version_step)
            self.stamps.setdefault(command.trajectory_id, {}).setdefault(command.attempt, stamp)
            sources = self.sources.setdefault(command.trajectory_id, set())
            sources.add((command.to, command.version))
        if isinstance(command, cmd.OpeningCommand):
            if command.trajectory_id not in self.issued:
                self.issued[command.trajectory_id] = command.purpose
                self.groups[command.group] = self.groups.get(command.group, 0) + 1
        elif isinstance(command, cmd.EndTrajectories):
            self._asked[command_id] = command.endings
            self.commanded |= {ending.trajectory_id: ending for ending in command.endings}
        elif isinstance(command, cmd.PullWeights) and command.purpose == PullPurpose.IN_FLIGHT:
            for name in state.members.replicas[command.to].running:
                self.sources[name].add((command.to, command.version))
        elif isinstance(command, cmd.TrainStep):
            self.steps[command.step_index] = OrderedStep(command)
            self.orders[command.step_index, command.version] = command

    def _close(self, event: ev.TrajectoriesEnded, state: State) -> None:
        """Close the trajectories that the store ended, unless the state still holds them."""
        rows = {row.trajectory_id: row for row in event.ended}
        for ending in self._asked.pop(event.command_id, ()):
            row = rows.get(ending.trajectory_id)
            if row is not None and ending.trajectory_id not in state.work.trajectories:
                self.closed[ending.trajectory_id] = ClosedTrajectory(
                    ending, row.num_tokens, row.tokens_lost
                )

    def list_trained(self, step: int) -> list[TrajectoryId]:
        """Return the sorted ids of the trajectories decided to end as trained by this step."""
        return sorted(
            e.trajectory_id
            for e in self.commanded.values()
            if (e.end, e.step) == (EndKind.TRAINED, step)
        )


class LedgerRow(NamedTuple):
    """Row of the ledger table."""

    name: str
    groups: int
    trajectories: int
    tokens: int


def ledger_rows(state: State) -> list[LedgerRow]:
    """Return the rows issued, trained, evaluated, one per drop reason, and live."""
    books = (state.work.ledger.groups, state.work.ledger.trajectories, state.work.ledger.tokens)
    reasons = sorted({reason for book in books for reason in book.dropped})
    rows = [
        LedgerRow("issued", *(book.issued for book in books)),
        LedgerRow("trained", *(book.trained for book in books)),
        LedgerRow("evaluated", *(book.evaluated for book in books)),
    ]
    rows += [
        LedgerRow(f"dropped: {reason}", *(book.dropped.get(reason, 0) for book in books))
        for reason in reasons
    ]
    return [*rows, LedgerRow("live", *(book.live for book in books))]


def ledger_problems(state: State, account: Account) -> list[str]:
    """Return the differences between the coordinator's counters and the items they count."""
    ledger = state.work.ledger
    groups = msgspec.structs.replace(ledger.groups, dropped=_sum_dropped(ledger.groups.dropped))
    problems = [
        *_compare_books("groups", groups, _group_book(account)),
        *_compare_books("trajectories", ledger.trajectories, _trajectory_book(account)),
        *_compare_books("tokens", ledger.tokens, _token_book(state, account)),
    ]
    live = ledger_rows(state)[-1]
    if state.run.phase == Phase.ENDED and any(live[1:]) and not state.run.stopped:
        problems.append(
            f"ledger: the run has ended with {live.groups} groups, {live.trajectories} "
            f"trajectories and {live.tokens} tokens live"
            + (f"; it failed: {state.run.failure}" if state.run.failure else "")
        )
    return problems


def _group_book(account: Account) -> LedgerCounts:
    """Count groups: each ends with its last sibling, as trained if any was; reasons are merged."""
    book = LedgerCounts(issued=len(account.groups))
    ends: dict[GroupId, list[EndKind]] = {}
    for closed in account.closed.values():
        ends.setdefault(closed.ending.group, []).append(closed.ending.end)
    for group, found in ends.items():
        if len(found) == account.groups.get(group):
            book.record_end(min(found, key=ENDS.index), DropReason.NONE)
    book.dropped = _sum_dropped(book.dropped)
    return book


def _trajectory_book(account: Account) -> LedgerCounts:
    book = LedgerCounts(issued=len(account.issued))
    for closed in account.closed.values():
        book.record_end(closed.ending.end, closed.ending.reason)
    return book


def _token_book(state: State, account: Account) -> LedgerCounts:
    """Count tokens: issued are those of ended trajectories and those known of live ones."""
    book = LedgerCounts(issued=sum(t.num_tokens for t in state.work.trajectories.values()))
    for closed in account.closed.values():
        book.issued += closed.num_tokens + closed.tokens_lost
        book.record_end(closed.ending.end, closed.ending.reason, closed.num_tokens)
        book.record_end(EndKind.DROPPED, DropReason.RESTARTED, closed.tokens_lost)
    return book


def _sum_dropped(dropped: dict[str, int]) -> dict[str, int]:
    return {ANY_REASON: sum(dropped.values())}


def _compare_books(name: str, counted: LedgerCounts, items: LedgerCounts) -> list[str]:
    """Compare two books class by class; an absent class counts 0."""
    sides = [
        {"issued": b.issued, "trained": b.trained, "evaluated": b.evaluated, "live": b.live}
        | {f"dropped: {reason}": count for reason, count in b.dropped.items()}
        for b in (counted, items)
    ]
    names = sorted(sides[0].keys() | sides[1].keys())
    pairs = [(key, sides[0].get(key, 0), sides[1].get(key, 0)) for key in names]
    return [
        f"ledger: {ours} {name} {key}, the log adds up to {theirs}"
        for key, ours, theirs in pairs
        if ours != theirs
    ]
