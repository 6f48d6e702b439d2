"""Events that the coordinator reports itself: its start, timers, silent and returning actors.

Reads   nothing
Gives   one frozen struct per event, each declared with the commands that it ends
"""

from __future__ import annotations

import msgspec

from laminar.events import commands as cmd
from laminar.events.base import Event, Settings, ends_commands
from laminar.events.families import Item
from laminar.names.ids import GroupId


class UnfinishedPrompt(Item, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that was dispatched and has no end."""

    group: GroupId
    row_index: int = msgspec.field(name="row")


class ForkOrigin(Item, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint of another run with which a fork begins, and its position in the data."""

    run: str  #: directory of that run, as the user named it
    step: int  #: completed steps
    version: int  #: version of its weights
    digest: str  #: chained digest over the ids of all batches that made it
    data: str  #: digest of the data; empty: this run has other data, and begins with the first row
    num_train: int
    cursor: int  #: next (pass * num_train + position) to dispatch
    seed: int  #: seed that orders the pass of the cursor
    shuffle: bool
    unfinished: tuple[UnfinishedPrompt, ...] = ()  #: in the order of dispatch


class CoordinatorStarted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """First record of every coordinator incarnation."""

    incarnation: int
    logic: int  #: version of the decision rules; an unknown one is refused
    settings: Settings
    clock_ns: int  #: wall clock of the coordinator's machine; event times are relative to it
    config: str  #: the resolved configuration as TOML, without secrets
    origin: ForkOrigin | None = None  #: origin of a fork, in its first record only
    #: digests of the user's reward, environment and strategy files, by path
    files: dict[str, str] = msgspec.field(default_factory=dict)


@ends_commands(cmd.RestartActor, cmd.ProposeBatch)
class TimerFired(Event, frozen=True, kw_only=True):
    """A timer of the state is due; a timer that is no longer set is ignored."""

    timer: str


@ends_commands(cmd.StopActor)
class HeartbeatLost(Event, frozen=True, kw_only=True):
    """The failure detector gave up on an actor: it was silent for its whole lease."""

    actor: str
    actor_incarnation: int
    silent_ms: int
    cut_off: bool = False  #: whether its whole machine was silent: no work there is to blame


class NodeSilent(Event, frozen=True, kw_only=True):
    """A node was silent for its lease, while other processes of its machine still respond."""

    node: str
    node_incarnation: int
    silent_ms: int


class NodeRecovered(Event, frozen=True, kw_only=True):
    """A silent node responds again."""

    node: str
    node_incarnation: int


class RunStalled(Event, frozen=True, kw_only=True):
    """Work remains and nothing has moved for `coordinator.stall_timeout_s`."""

    awaited: str  #: kind of the event that would move the run
    owner: str  #: process that must send it
    owner_incarnation: int  #: 0: it has not joined
    waiter: str  #: "step 12", or the process that waits
    what: str  #: the awaited thing
    idle_ms: int


class DrainRequested(Event, frozen=True, kw_only=True):
    """The user asked the run to end gracefully (Ctrl-C), at once (a second one), or to pause.

    A batch system asks for a pause: it will soon end all processes, and restart them later."""

    reason: str
    at_once: bool = False  #: neither complete the step in training nor export the model
    pause: bool = False  #: complete and save the step in training; all else stays open
    #: time during a pause to finish responses that could not continue later
    response_timeout_ms: int = 0


class RunResumed(Event, frozen=True, kw_only=True):
    """No process of the run was left (a power cut, a time limit): all are restarted.

    The settings are those that may change between starts, with their values from now on."""

    asked: bool  #: requested by the user: a stopped run continues, too
    total_steps: int
    test_freq: int
    save_freq: int


class TrainingWarning(Event, frozen=True, kw_only=True):
    """Training shows a problem that a person should look at; each kind is reported once."""

    kind: str  #: no-signal, truncated, ...: docs/training.md
    step: int  #: completed steps at that time
    text: str  #: the figure, its limit, and the place to look


@ends_commands(cmd.ProposeBatch)
class BatchProposed(Event, frozen=True, kw_only=True):
    """The user's batch strategy answered; `groups` is empty when it failed."""

    step_index: int = msgspec.field(name="step")
    groups: tuple[GroupId, ...]
    detail: str = ""
