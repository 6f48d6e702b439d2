"""Work: groups of trajectories until they are trained, evaluated or dropped, and their ledger.

Reads   nothing
Gives   Work and its parts Trajectory, Group, Ledger

The ledger: issued = trained + evaluated + dropped(reason) + live, exactly, at every event. Three
books of the same form: groups, trajectories, tokens. A token is issued when the store has it;
the core learns of it with `trajectory-finished` and `trajectories-ended` (which also reports tokens
lost by earlier attempts, dropped as "restarted"). Live is not stored but counted from the state, so
that the balance is a check and not a definition.
"""

from __future__ import annotations

import msgspec

from laminar.core.state.statuses import GroupStatus, TrajectoryStatus, encode_default
from laminar.events.reasons import DropReason, EndKind
from laminar.names.ids import GroupId, Purpose, TrajectoryId


class Trajectory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A trajectory: one attempt at one prompt; core/state/transitions.py has its statuses."""

    id: TrajectoryId
    group: GroupId
    sibling: int
    status: TrajectoryStatus = encode_default(TrajectoryStatus.DISPATCHED)
    replica: str = ""  #: replica that generates or scores it
    placement: int = 1
    attempt: int = 1
    version: int = 0  #: version that samples it, or did last
    step: int = 0  #: step of the oldest weights which may have sampled parts of it; -1: none has
    num_tokens: int = 0  #: tokens issued in the ledger
    reward_bits: int = -1
    correct: bool = False
    deaths: int = 0  #: replicas that died while they ran it
    batch_timeouts: int = 0  #: times that a batch gave up waiting for it
    restart: bool = False  #: whether lost work must begin again from the prompt

    @property
    def is_unsampled(self) -> bool:
        """Whether its session has not had a turn, which any weights as new as its group's give."""
        return self.step < 0


class Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The siblings of one prompt in one pass (or one evaluation sample)."""

    id: GroupId
    purpose: Purpose
    row_index: int
    step: int  #: oldest step whose weights generated for it
    deadline: int  #: last batch index that may train it; -1 for evaluation
    order: int  #: dispatch order, 0-based over the run
    members: list[TrajectoryId]
    unfinished: int  #: members neither rewarded nor ending
    status: GroupStatus = encode_default(GroupStatus.OPEN)
    end: EndKind = EndKind.NONE  #: end, once its status is ending
    end_reason: DropReason = DropReason.NONE
    mixed: bool = False  #: whether a sibling started over on another version
    sample: int = 0  #: sample index at its evaluation prompt


class LedgerCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The counts of one kind of thing."""

    issued: int = 0
    trained: int = 0
    evaluated: int = 0
    dropped: dict[str, int] = {}  #: by reason

    def record_end(self, end: EndKind, reason: DropReason, count: int = 1) -> None:
        """Move `count` things from live to their end."""
        if end == EndKind.TRAINED:
            self.trained += count
        elif end == EndKind.EVALUATED:
            self.evaluated += count
        else:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    @property
    def live(self) -> int:
        return self.issued - self.trained - self.evaluated - sum(self.dropped.values())


class Ledger(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The three books of a run."""

    groups: LedgerCounts = msgspec.field(default_factory=LedgerCounts)
    trajectories: LedgerCounts = msgspec.field(default_factory=LedgerCounts)
    tokens: LedgerCounts = msgspec.field(default_factory=LedgerCounts)


class Work(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The open groups and trajectories of a run, and the books of all."""

    groups: dict[GroupId, Group] = {}
    trajectories: dict[TrajectoryId, Trajectory] = {}
    next_order: int = 0
    #: finished groups that no batch has taken
    ready: dict[GroupId, None] = {}
    #: unchosen training groups by deadline, for the staleness bound
    deadlines: dict[int, int] = {}
    #: trajectories whose replica is gone, oldest first
    lost: dict[TrajectoryId, None] = {}
    #: host that has the session of a trajectory
    sessions: dict[TrajectoryId, str] = {}
    #: trajectories that no live replica is scoring, or whose session no live host has
    unscored: dict[TrajectoryId, None] = {}
    ledger: Ledger = msgspec.field(default_factory=Ledger)
