"""THE STATE MACHINE: the only path from a logged event to its commands. Read this first.

Reads   Stamped events, in the order of the log
Writes  State (nothing else changes it)
Emits   commands, each with its cause

    handle(event) = refuse it if its sender is fenced, or is not the one to report it,
                    or if it cannot be true
                  -> its handler records the fact  (core/registry.py has one for each event)
                  -> the planner acts on the new situation (core/planner.py),
                     unless no decision can depend on the fact

The planner decides everything that depends on the whole situation: the phase of the run, the batch
to train, the version to publish, the step to repeat, the places of groups, lost work and
evaluations, the loads of replicas, rewards to repeat, migrations. It decides from the state as it
then is, so the order in which facts arrived cannot be forgotten or counted twice.

A handler records its fact and decides only the direct consequences of that fact. Most decide
nothing. The exceptions: a joining process is accepted or refused, a hanging one restarted, a relay
is given its successor and its pins, a returning trainer its checkpoint, refused weights are loaded
again, migrated or late work continues or is given up, a failure ends the run.

Pure: no clock, no randomness, no file. A choice is a hash of (seed, subject); sets are never
iterated.
"""

from __future__ import annotations

# these modules register their handlers on import
from laminar.core import (
    loading,  # noqa: F401
    store_orders,  # noqa: F401
    timers,  # noqa: F401
)
from laminar.core.context import Context
from laminar.core.members import (
    lifecycle,  # noqa: F401
    membership,  # noqa: F401
    resumption,  # noqa: F401
    stalls,  # noqa: F401
)
from laminar.core.planner import run_planner
from laminar.core.registry import HANDLING as HANDLING  # complete, with all of the above
from laminar.core.registry import handles
from laminar.core.repack import migration  # noqa: F401
from laminar.core.rules import LogicError, require_known
from laminar.core.scheduling import (
    groups,
    trajectories,  # noqa: F401
)
from laminar.core.state import forks, keys
from laminar.core.state.state import State
from laminar.core.steps import (
    batching,  # noqa: F401
    step_replay,  # noqa: F401
)
from laminar.core.validation import accept_any
from laminar.core.versions import (
    broadcast,  # noqa: F401
    publishing,  # noqa: F401
)
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Stamped
from laminar.names.roles import Role


class StateMachine:
    """State and the only way to change it."""

    def __init__(self, state: State | None = None) -> None:
        """Start at the beginning of a run, or with the state of a snapshot."""
        if state is not None:
            require_known(state.logic, state.settings)
        self._state = state

    @property
    def started(self) -> bool:
        """Whether the first event has arrived."""
        return self._state is not None

    @property
    def state(self) -> State:
        if self._state is None:
            raise LogicError("the first event of a log must be coordinator-started")
        return self._state

    def handle_event(self, stamped: Stamped) -> list[Command]:
        """Apply one event and return the commands that it causes, in order."""
        if self._state is None:
            self._state = _create_state(stamped)
        state = self._state
        state.seq = stamped.seq
        state.time_ns = max(state.time_ns, stamped.time_ns)
        ctx, event = Context(state, stamped), stamped.event
        handling = HANDLING[type(event)]
        if not _is_from_known_sender(ctx):
            ctx.ignore("fenced")
        elif not _from_right_sender(ctx):
            ctx.ignore("wrong-sender")
        elif not handling.valid(state, event):
            ctx.ignore("impossible")
        else:
            handling.handler(ctx, event)
            if handling.planned or ctx.any_touched or ctx.failure is not None:
                run_planner(ctx)
                groups.send_endings(ctx)
        return ctx.commands


def _create_state(stamped: Stamped) -> State:
    event = stamped.event
    if not isinstance(event, ev.CoordinatorStarted):
        raise LogicError("the first event of a log must be coordinator-started")
    require_known(event.logic, event.settings)
    state = State(settings=event.settings, logic=event.logic)
    if event.origin is not None:
        forks.apply_origin(state, event.origin)
    return state


def _is_from_known_sender(ctx: Context) -> bool:
    """Return whether the sender's incarnation is current; late events of live actors count."""
    stamped = ctx.stamped
    if stamped.peer == COORDINATOR or isinstance(stamped.event, ev.ActorJoined):
        return True
    actor = ctx.state.members.actors.get(stamped.peer)
    if actor is None or not actor.alive or actor.incarnation != stamped.incarnation:
        return False
    if stamped.peer_seq:
        actor.last_peer_seq = stamped.peer_seq
    return True


def _from_right_sender(ctx: Context) -> bool:
    """Return whether the event is from a role that can know it; a joining process has none yet."""
    actor = ctx.state.members.actors.get(ctx.stamped.peer)
    role = actor.role if actor is not None else Role.COORDINATOR
    event = ctx.stamped.event
    return role in ev.REPORTED_BY[type(event)] or isinstance(event, ev.ActorJoined)


@handles(ev.CoordinatorStarted, valid=accept_any)
def on_coordinator_started(ctx: Context, event: ev.CoordinatorStarted) -> None:
    """Start or take over the coordinator: reset progress clocks here; leases are reset outside."""
    state = ctx.state
    require_known(event.logic, event.settings)
    if state.members.coordinator_incarnation == 0:
        ctx.set_timer(keys.START, state.settings.start_timeout_ms)
    state.members.coordinator_incarnation = event.incarnation
    for replica in state.members.replicas.values():
        replica.progress_ns = ctx.stamped.time_ns
    ctx.touch_all()
