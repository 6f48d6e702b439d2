"""What the coordinator itself reports: its start, its timers, what it heard or no longer hears.

Reads   nothing
Gives   one frozen struct per event, each declared with who reports it and which commands it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, Settings, reported_by
from laminar.names.ids import GroupId
from laminar.names.roles import Role


class UnfinishedPrompt(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A prompt that was handed out and has no end."""

    group: GroupId
    row_index: int = msgspec.field(name="row")


class ForkOrigin(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The checkpoint of another run with which this one begins, and how far that was in its data
    then."""

    run: str  #: its directory, as it was named
    step: int  #: completed
    version: int  #: of its weights
    digest: str  #: chained over the ids of all batches that made it
    data: str  #: digest of the data; empty: this run has other data, and begins with the first row
    num_train: int
    cursor: int  #: next (pass * num_train + position) to hand out
    seed: int  #: that the pass of the cursor is ordered by
    shuffle: bool
    unfinished: tuple[UnfinishedPrompt, ...] = ()  #: in the order of dispatch


@reported_by(Role.COORDINATOR)
class CoordinatorStarted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """First record of every coordinator incarnation."""

    incarnation: int
    logic: int  #: version of the decision rules; an unknown one is refused
    settings: Settings
    clock_ns: int  #: this machine's time of day; event times are relative to it
    config: str  #: the resolved configuration as TOML, without secrets
    origin: ForkOrigin | None = None  #: of a fork, in its first record


@reported_by(
    Role.COORDINATOR,
    ends=(
        cmd.RestartActor,
        cmd.ProposeBatch,
    ),
)
class TimerFired(Event, frozen=True, kw_only=True):
    """A time that the state was waiting for has come; a timer that is no longer set is ignored."""

    timer: str


@reported_by(Role.COORDINATOR, ends=(cmd.StopActor,))
class HeartbeatLost(Event, frozen=True, kw_only=True):
    """The failure detector gave up on an actor: nothing was heard for the lease."""

    actor: str
    actor_incarnation: int
    silent_ms: int
    cut_off: bool = False  #: nobody of its machine was heard: no work there is to blame


@reported_by(Role.COORDINATOR)
class NodeSilent(Event, frozen=True, kw_only=True):
    """Nothing was heard of a node for its lease, while processes of its machine go on speaking."""

    node: str
    node_incarnation: int
    silent_ms: int


@reported_by(Role.COORDINATOR)
class NodeHeard(Event, frozen=True, kw_only=True):
    """A node that was silent speaks again."""

    node: str
    node_incarnation: int


@reported_by(Role.COORDINATOR)
class DrainRequested(Event, frozen=True, kw_only=True):
    """The user asked the run to end gracefully (Ctrl-C), at once (a second one), or to pause.

    A batch system asks for a pause: it ends all processes soon, and starts them again."""

    reason: str
    at_once: bool = False  #: neither complete the step in training nor export the model
    pause: bool = False  #: complete and save the step in training; all else stays open
    #: for a pause: so long answers are finished that could not go on later
    answers_ms: int = 0


@reported_by(Role.COORDINATOR)
class RunResumed(Event, frozen=True, kw_only=True):
    """No process of the run was left (a power cut, a time limit): all are started again.

    The settings are those that may be changed for the rest of a run, as they are from now on.
    """

    asked: bool  #: by the user: a run that was stopped goes on as well
    total_steps: int
    test_freq: int
    save_freq: int


@reported_by(Role.COORDINATOR)
class TrainingWarning(Event, frozen=True, kw_only=True):
    """Learning goes badly in a way that a person should look at; each kind comes once in a run."""

    kind: str  #: no-signal, truncated, ...: docs/training.md
    step: int  #: completed steps when it was seen
    text: str  #: the figure, its limit, and what to look at


@reported_by(Role.COORDINATOR, ends=(cmd.ProposeBatch,))
class BatchProposed(Event, frozen=True, kw_only=True):
    """The user's batch strategy answered; `groups` is empty when it failed."""

    step_index: int = msgspec.field(name="step")
    groups: tuple[GroupId, ...]
    detail: str = ""
