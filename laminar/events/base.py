"""What every event and command has in common: frozen, strict, tagged in kebab-case, declared once.

Reads   nothing
Gives   Event, Command (bases), Settings (the part of the config that decisions depend on);
        reported_by and carried_out_by, the declarations, and the registers that they fill

The tag is made from the class name, `TrajectoryFinished` -> `trajectory-finished`, so that a name
in the log, in the docs and in the code is one name. Integers and strings only where the core keeps
a value: a reward travels as the bits of its float64, because the core's state holds no floats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from laminar.names.roles import Role


class WireError(ValueError):
    """Bytes that are no legal message or frame here; they change nothing, the owner counts them."""


def to_kebab_case(name: str) -> str:
    """`TrajectoryFinished` -> `trajectory-finished`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag=to_kebab_case,
    gc=False,
):
    """A fact, in the past tense. It may arrive more than once; handling is idempotent."""


class Command(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag=to_kebab_case,
    gc=False,
):
    """A decision, in the imperative, addressed to one process.

    A field that is added later has a default that is the old meaning. It is left out of the
    encoding (core/state/state.py says which defaults can be), so the decisions of older logs stay
    equal.
    """

    to: str  #: actor name


AnEvent = TypeVar("AnEvent", bound=Event)
ACommand = TypeVar("ACommand", bound=Command)
Roles = tuple[Role, ...]

#: of every event, in the order of their declarations: who may report it
REPORTED_BY: dict[type[Event], Roles] = {}
#: of every event: the commands that are no longer outstanding once it has come
ENDS: dict[type[Event], tuple[type[Command], ...]] = {}
#: of every command, in the order of their declarations: which role does it
CARRIED_OUT_BY: dict[type[Command], Roles] = {}


def reported_by(
    *roles: Role, ends: tuple[type[Command], ...] = ()
) -> Callable[[type[AnEvent]], type[AnEvent]]:
    """Declare an event: the machine refuses it from any other role."""

    def declare(kind: type[AnEvent]) -> type[AnEvent]:
        REPORTED_BY[kind], ENDS[kind] = roles, ends
        return kind

    return declare


def carried_out_by(*roles: Role) -> Callable[[type[ACommand]], type[ACommand]]:
    """Declare a command: which roles it is addressed to."""

    def declare(kind: type[ACommand]) -> type[ACommand]:
        CARRIED_OUT_BY[kind] = roles
        return kind

    return declare


class Settings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What the decisions depend on; fixed for a run and logged with `coordinator-started`.

    A field that is added later has a default under which the decisions are the old ones: so an
    older log is replayed by the rules that it was written with.
    """

    seed: int
    groups_per_step: int  #: prompts of one batch
    group_size: int  #: siblings of one prompt
    min_scored: int  #: rewarded siblings below which a group is dropped
    max_staleness: int  #: completed steps
    #: new groups that one replica takes before it would rather pull; 0: it pulls without that
    groups_per_version: int
    total_steps: int  #: 0: until the data ends
    total_epochs: int
    shuffle: bool
    drop_last: bool
    test_freq: int
    val_before_train: bool
    batch_strategy: str
    reward_scope: str  #: trajectory | group
    resume_wait_ms: int
    batch_wait_ms: int
    start_timeout_ms: int  #: for every actor to join and the first weights to be published
    stall_ms: int  #: an actor that answers but makes no progress for so long is restarted
    engine_start_ms: int  #: for a replica that has joined to be ready
    #: failed attempts to score, of a thousand, above which the run ends; 1000: never
    max_error_permille: int
    disk_wait_ms: int = 0  #: how long the store may wait for room on its disk
    eval_answers: int = 1  #: to each held-out prompt
    repack_policy: str = ""  #: gain | best-fit; empty: trajectories are not repacked
    repack_interval_ms: int = 0
    repack_release_ms: int = 0  #: for a replica to hand over what it gives away
    repack_prefill_tokens: int = 0  #: prefilled in the time of one decode step
    save_freq: int = 0  #: a checkpoint every so many steps; 0: none
    filter_metric: str = ""  #: score | acc: groups all alike in it are dropped; empty: none are
    filter_batches: int = 0  #: batches of such groups in a row that end the run; 0: none do
    #: replicas load newer weights while they run, and what runs goes on with them
    in_flight: bool = False
    #: a replica without weights begins with those that its relay is still getting
    stream: bool = False
    #: of an environment, on one replica; 0: a response has one turn
    max_sessions: int = 0
    turn_timeout_ms: int = 0  #: of the calls of one turn, which an order to score waits for
    rules: tuple[str, ...] = ()  #: changed decision rules of this run, by name (core/rules.py)

    @property
    def environment(self) -> bool:
        """Whether a turn may be followed by another one."""
        return self.max_sessions > 0

    @property
    def keeps_checkpoints(self) -> bool:
        """A lost trainer comes back, and a run whose processes have all ended can be resumed."""
        return self.save_freq > 0


class Stamped(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as the machine sees it: in its place in the log, with its sender."""

    seq: int  #: 1-based place in the run's history
    time_ns: int  #: the coordinator's clock, never decreasing
    peer: str  #: actor name; "coordinator" for its own
    incarnation: int  #: of the sender
    peer_seq: int  #: the session's number of the message, 0 for gauges and for our own
    event: Event


COORDINATOR = str(Role.COORDINATOR)  #: the peer name of events that the coordinator itself reports
STRATEGY = str(Role.STRATEGY)  #: the addressee of commands for the batch strategy's worker
