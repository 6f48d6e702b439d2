"""Statuses and legal moves of trajectories, groups, the run, actors and weight versions.

Reads   a status and a trigger
Writes  trajectory.status, group.status, state.run.phase
Gives   TABLES; docs/states.md is drawn from them (tools/make/states.py)

Trajectories, groups and the run store their status and move by these tables. The status of an actor
or a version follows from several fields; a test compares every change with its table.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, Phase, TrajectoryStatus
from laminar.core.state.work import Group, Trajectory

DISPATCHED, RUNNING, GENERATED, REWARDED, RELEASING, LOST, ENDING, WAITING = TrajectoryStatus


Status = TypeVar("Status", bound=str)


class TransitionTable(NamedTuple, Generic[Status]):
    """The statuses of one kind of thing, the initial one first, and its moves."""

    of: str
    meaning: dict[Status, str]
    moves: dict[tuple[Status, str], Status]  #: next status by (status, trigger)


TRAJECTORY_TRANSITIONS = {
    (DISPATCHED, "started"): RUNNING,
    (DISPATCHED, "finished"): GENERATED,  # before its replica died
    (RUNNING, "finished"): GENERATED,
    (GENERATED, "rewarded"): REWARDED,
    (WAITING, "request"): LOST,
    (WAITING, "rewarded"): REWARDED,
    (DISPATCHED, "answer"): WAITING,
    (RUNNING, "answer"): WAITING,
    (RELEASING, "answer"): WAITING,
    (WAITING, "restart"): WAITING,
    (LOST, "restart"): WAITING,
    (DISPATCHED, "lose"): LOST,
    (RUNNING, "lose"): LOST,
    (DISPATCHED, "release"): RELEASING,
    (RUNNING, "release"): RELEASING,
    (RELEASING, "started"): RELEASING,  # reported before the replica had the release order
    (RELEASING, "finished"): GENERATED,
    (RELEASING, "migrate"): DISPATCHED,
    (RELEASING, "lose"): LOST,
    (LOST, "dispatch"): DISPATCHED,
    (DISPATCHED, "end"): ENDING,
    (RUNNING, "end"): ENDING,
    (RELEASING, "end"): ENDING,
    (GENERATED, "end"): ENDING,
    (REWARDED, "end"): ENDING,
    (LOST, "end"): ENDING,
    (WAITING, "end"): ENDING,
}
TRAJECTORY = TransitionTable(
    "trajectory",
    {
        DISPATCHED: "the command was sent; no token is known yet",
        RUNNING: "the engine has it",
        GENERATED: "every token is durable, the reward is missing",
        REWARDED: "waits for the rest of its group and for a batch",
        RELEASING: "its replica stores its tokens; it continues on another one",
        LOST: "its replica was lost, or its session requests a turn; it needs a new placement",
        ENDING: "its end is decided and on its way to the store; once stored, it is dropped",
        WAITING: "its session starts, or has the last turn; no replica has it",
    },
    TRAJECTORY_TRANSITIONS,
)
GROUP = TransitionTable(
    "group",
    {
        GroupStatus.OPEN: "some of its trajectories are unfinished",
        GroupStatus.READY: "all have ended or are rewarded; it waits for a batch",
        GroupStatus.CHOSEN: "in the batch that the trainer works on",
        GroupStatus.ENDING: "trained, evaluated or dropped; it waits for the store",
    },
    {
        (GroupStatus.OPEN, "complete"): GroupStatus.READY,
        (GroupStatus.READY, "choose"): GroupStatus.CHOSEN,
        (GroupStatus.OPEN, "end"): GroupStatus.ENDING,
        (GroupStatus.READY, "end"): GroupStatus.ENDING,
        (GroupStatus.CHOSEN, "end"): GroupStatus.ENDING,
    },
)
RUN = TransitionTable(
    "run",
    {
        Phase.STARTING: "waits for its processes and the first weights",
        Phase.RUNNING: "generates and trains",
        Phase.EXPORTING: "the steps are done, or the run drains; the model is exported",
        Phase.FINAL_EVALUATION: "the export is evaluated",
        Phase.ENDING: "the store writes the last ends",
        Phase.STOPPING: "every process is ordered to stop",
        Phase.ENDED: "the log has its last event",
    },
    {
        (Phase.STARTING, "publish"): Phase.RUNNING,
        (Phase.RUNNING, "finish"): Phase.EXPORTING,
        (Phase.EXPORTING, "evaluate"): Phase.FINAL_EVALUATION,
        (Phase.FINAL_EVALUATION, "repeat export"): Phase.EXPORTING,  # lost, and other bytes
        (Phase.STARTING, "stop now"): Phase.STOPPING,  # to be resumed; here only by a pause
        (Phase.RUNNING, "stop now"): Phase.STOPPING,
        (Phase.EXPORTING, "stop now"): Phase.STOPPING,
        (Phase.FINAL_EVALUATION, "stop now"): Phase.STOPPING,
        (Phase.ENDING, "stop now"): Phase.STOPPING,
        # resumed: it was stopped, or has more steps now
        (Phase.EXPORTING, "resume"): Phase.RUNNING,
        (Phase.FINAL_EVALUATION, "resume"): Phase.RUNNING,
        (Phase.ENDING, "resume"): Phase.RUNNING,
        (Phase.STOPPING, "resume"): Phase.RUNNING,
        (Phase.ENDED, "resume"): Phase.RUNNING,
        (Phase.STOPPING, "restart"): Phase.STARTING,  # resumed before the first weights
        (Phase.ENDED, "restart"): Phase.STARTING,
        (Phase.STARTING, "end"): Phase.ENDING,
        (Phase.RUNNING, "end"): Phase.ENDING,
        (Phase.EXPORTING, "end"): Phase.ENDING,
        (Phase.FINAL_EVALUATION, "end"): Phase.ENDING,
        (Phase.ENDING, "end"): Phase.ENDING,  # failure while it ends
        (Phase.ENDING, "stop"): Phase.STOPPING,
        (Phase.STOPPING, "stopped"): Phase.ENDED,
    },
)
ACTOR = TransitionTable(
    "actor",
    {
        "unknown": "no process of this name has joined",
        "joined": "a process has this name, with a new incarnation",
        "ready": "it can do its work",
        "silent": "a node that is silent while the processes of its machine are not",
        "lost": "fenced: events of this incarnation are refused",
    },
    {
        ("unknown", "join"): "joined",
        ("joined", "ready"): "ready",
        ("joined", "silence"): "silent",
        ("silent", "recover"): "joined",
        ("joined", "lose"): "lost",
        ("ready", "lose"): "lost",
        ("silent", "lose"): "lost",
        ("lost", "join"): "joined",  # with the next incarnation
    },
)
VERSION = TransitionTable(
    "version",
    {
        "unused": "its number is free",
        "ordered": "the trainer is ordered to make it, by a step or by the export",
        "made": "the trainer has it and passes it to its relay",
        "owed": "the relay of the trainer's machine lacks it; it is published again",
        "newest": "published last",
        "older": "a newer one is published; a relay or a checkpoint still has it",
        "gone": "no replica can load it",
    },
    {
        ("unused", "order"): "ordered",
        ("unused", "load"): "made",  # version 0: the model as it was loaded
        ("unused", "repeat"): "owed",  # a repeated step gave other weights
        ("ordered", "make"): "made",
        ("ordered", "skip"): "owed",
        ("ordered", "publish"): "newest",  # the relay's report comes before the trainer's
        ("made", "publish"): "newest",
        ("made", "skip"): "owed",
        ("made", "supersede"): "older",
        ("made", "evict"): "gone",
        ("owed", "publish"): "newest",
        ("owed", "supersede"): "older",
        ("owed", "evict"): "gone",
        ("newest", "lose"): "owed",
        ("newest", "supersede"): "older",
        ("newest", "evict"): "gone",  # superseded and evicted by one event
        ("older", "evict"): "gone",
        ("gone", "return"): "older",  # a relay reports it late, or its checkpoint is saved
    },
)
TABLES: tuple[TransitionTable[Any], ...] = (TRAJECTORY, GROUP, RUN, ACTOR, VERSION)

IN_ENGINE = (DISPATCHED, RUNNING, RELEASING)
UNFINISHED = (DISPATCHED, RUNNING, GENERATED, RELEASING, LOST, WAITING)


def transition(trajectory: Trajectory, trigger: str) -> bool:
    """Make the move if the table has it; return False, without a change, otherwise."""
    target = TRAJECTORY_TRANSITIONS.get((trajectory.status, trigger))
    if target is None:
        return False
    trajectory.status = target
    return True


def move_group(group: Group, trigger: str) -> None:
    """Make the move; raise KeyError for one that no decision may make."""
    group.status = GROUP.moves[group.status, trigger]


def move_run(state: State, trigger: str) -> None:
    """Enter the next phase; raise KeyError for a move that no decision may make."""
    state.run.phase = RUN.moves[state.run.phase, trigger]
