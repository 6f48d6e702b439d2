"""Base classes and declarations of events and commands: frozen, strict, tagged in kebab-case.

Reads   nothing
Gives   Event, Command (bases), Settings (the part of the config that decisions depend on);
        ends, the declaration of the commands that an event ends; get_tag

Which roles report an event or carry out a command: names/roles.py, by their tags.

The tag is made from the class name, `TrajectoryFinished` -> `trajectory-finished`, so the same name
appears in the log, the docs and the code. Values that the core keeps are integers and strings only:
a reward travels as the bits of its float64, because the core's state holds no floats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from laminar.names.roles import Role


class WireError(ValueError):
    """Bytes that are not a legal message or frame; they change nothing and are counted."""


def to_kebab_case(name: str) -> str:
    """Return the kebab-case form of a class name: `TrajectoryFinished` -> `trajectory-finished`."""
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

    A field that is added later has a default with the old meaning. The default is left out of the
    encoding (core/state/state.py lists the possible defaults), so the decisions of older logs stay
    equal.
    """

    to: str  #: actor name


AnEvent = TypeVar("AnEvent", bound=Event)
Message = Event | Command | type[Event] | type[Command]

#: commands that are no longer outstanding once each event has arrived
ENDS: dict[type[Event], tuple[type[Command], ...]] = {}


def get_tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


def ends(*commands: type[Command]) -> Callable[[type[AnEvent]], type[AnEvent]]:
    """Declare the commands that an event ends."""

    def declare(kind: type[AnEvent]) -> type[AnEvent]:
        ENDS[kind] = commands
        return kind

    return declare


class Settings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The part of the configuration that decisions depend on, logged with `coordinator-started`.

    The settings are fixed for a run. A field that is added later has a default that keeps the old
    decisions, so an older log is replayed by the rules that it was written with.
    """

    seed: int
    groups_per_step: int  #: prompts of one batch
    group_size: int  #: siblings of one prompt
    min_scored: int  #: rewarded siblings below which a group is dropped
    max_staleness: int  #: completed steps
    #: new groups that one replica takes before it prefers a pull; 0: no limit
    groups_per_version: int
    total_steps: int  #: 0: until the data ends
    total_epochs: int
    shuffle: bool
    drop_last: bool
    test_freq: int
    val_before_train: bool
    batch_strategy: str
    reward_scope: str  #: trajectory | group
    resume_timeout_ms: int
    batch_timeout_ms: int
    start_timeout_ms: int  #: for every actor to join and the first weights to be published
    stall_ms: int  #: time without progress after which an actor that still answers is restarted
    engine_start_ms: int  #: time from a replica's join to its being ready
    #: failed reward attempts per thousand above which the run ends; 1000: never
    max_error_permille: int
    disk_full_timeout_ms: int = 0  #: time that the store may wait for room on its disk
    eval_answers: int = 1  #: responses to each evaluation prompt
    repack_policy: str = ""  #: gain | best-fit; empty: trajectories are not repacked
    repack_interval_ms: int = 0
    repack_release_timeout_ms: int = (
        0  #: time for a replica to hand over the trajectories that it releases
    )
    repack_prefill_tokens: int = 0  #: tokens prefilled in the time of one decode step
    save_freq: int = 0  #: steps between checkpoints; 0: none
    filter_metric: str = ""  #: score | acc: groups without variance in it are dropped; empty: none
    filter_batches: int = 0  #: batches of dropped groups in a row that end the run; 0: no limit
    #: whether replicas load newer weights while they run, and running trajectories continue with
    #: them
    in_flight: bool = False
    #: whether a replica without weights begins with those that its relay is still receiving
    stream: bool = False
    #: environment sessions on one replica; 0: a response has one turn
    max_sessions: int = 0
    turn_timeout_ms: int = 0  #: time for the tool calls of one turn, part of a score command's
    #: non-finite updates in a row that end the run; 0: no limit
    max_nonfinite_updates: int = 0
    rules: tuple[str, ...] = ()  #: changed decision rules of this run, by name (core/rules.py)

    @property
    def has_environment(self) -> bool:
        """Whether another turn may follow a turn."""
        return self.max_sessions > 0

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether checkpoints are saved, so that a lost trainer returns and a run can resume."""
        return self.save_freq > 0


class Stamped(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as the machine sees it: with its place in the log and its sender."""

    seq: int  #: 1-based place in the run's history
    time_ns: int  #: the coordinator's clock, never decreasing
    peer: str  #: actor name; "coordinator" for its own
    incarnation: int  #: of the sender
    peer_seq: int  #: session number of the message, 0 for gauges and the coordinator's own
    event: Event


COORDINATOR = str(Role.COORDINATOR)  #: the peer name of events that the coordinator itself reports
STRATEGY = str(Role.STRATEGY)  #: the addressee of commands for the batch strategy's worker
