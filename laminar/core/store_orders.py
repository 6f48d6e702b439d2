"""The store's readiness and restarts: its outstanding orders outlive its process.

Reads   DataLoaded; losses of the store
Writes  state.data.num_train, state.data.num_eval; addressee and deadlines of its outstanding orders
Emits   nothing: the coordinator sends outstanding orders to each process that it accepts

Whatever the store has acknowledged is on disk, so a new process continues where the last one ended.
Its clients retry by themselves; only the coordinator's orders are handled here. No actor is to
blame meanwhile: no replica stalls and no batch gives up an awaited group.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.state import forks, keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.keys import CommandKey
from laminar.core.state.members import ActorState
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.validation import ROWS_MAX
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names.roles import Role

END_TIMEOUT_MS = 120_000
"""The timeout of one transaction of the store; a later answer means a hang, or a slow disk."""


def is_store_awaited(state: State) -> bool:
    """Return whether the store is lost, or about to be restarted, and has a time to come back."""
    return any(
        keys.rejoin_timer(name) in state.orders.timers
        or keys.restart_key(name) in state.orders.commands
        for name in indexes_of(state).roles.get(Role.STORE, ())
    )


def can_survive_restart(state: State, command: Command) -> bool:
    """Return whether a new process can carry out this order of its predecessor."""
    running = state.run.phase not in (Phase.STOPPING, Phase.ENDED)
    return running and isinstance(command, cmd.EndTrajectories)


def handle_store_lost(ctx: Context, name: str) -> None:
    """Suspend the deadlines of a lost store's orders."""
    for key in _list_store_orders(ctx.state, name):
        ctx.clear_timer(keys.deadline_timer(key))


def handle_store_joined(ctx: Context, actor: ActorState) -> None:
    """Readdress waiting orders to the new process; they are sent once it is accepted."""
    for key in _list_store_orders(ctx.state, actor.name):
        ctx.state.orders.commands[key].incarnation = actor.incarnation


def _has_valid_counts(state: State, event: ev.DataLoaded) -> bool:
    """Return whether the row counts are possible; only a run without steps can have no rows."""
    least = 1 if state.settings.total_steps else 0
    return least <= event.num_train <= ROWS_MAX and 0 <= event.num_eval <= ROWS_MAX


@handles(ev.DataLoaded, valid=_has_valid_counts)
def on_data_loaded(ctx: Context, event: ev.DataLoaded) -> None:
    """Record the fixed number of prompts in the store; a restarted store refuses other data."""
    if ctx.mark_ready():
        _restart_deadlines(ctx)
    if ctx.state.data.num_train < 0:
        ctx.state.data.num_train, ctx.state.data.num_eval = event.num_train, event.num_eval
        forks.data_loaded(ctx.state, event)


def _restart_deadlines(ctx: Context) -> None:
    """Restart the deadlines of all that waited for the store, which can write again."""
    state = ctx.state
    timeout_ms = END_TIMEOUT_MS + state.settings.disk_full_timeout_ms
    for key in _list_store_orders(state, ctx.stamped.peer):
        ctx.set_timer(keys.deadline_timer(key), timeout_ms)
    for replica in state.members.replicas.values():
        replica.progress_ns = ctx.stamped.time_ns


def _list_store_orders(state: State, name: str) -> list[CommandKey]:
    kept = indexes_of(state).commands.get(name, ())
    return [key for key in kept if can_survive_restart(state, state.orders.commands[key].command)]
