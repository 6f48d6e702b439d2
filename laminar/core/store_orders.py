"""Restarts of the store: its outstanding orders outlive its process.

Reads   losses of the store, and readiness of its next process
Writes  the addressee of its outstanding orders, their deadlines, its time to return
Emits   nothing: the coordinator sends outstanding orders to each process that it accepts

Whatever the store has acknowledged is on disk, so a new process continues where the last one ended.
Its clients retry by themselves; only the coordinator's orders are handled here. No actor is to
blame meanwhile: no replica stalls and no batch gives up an awaited group.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.keys import CommandKey
from laminar.core.state.state import ActorState, State
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events.base import Command
from laminar.names.roles import ROLE_TABLE, Role

END_TIMEOUT_MS = 120_000
"""The timeout of one transaction of the store; a later answer means a hang, or a slow disk."""


def may_join(state: State, role: str) -> bool:
    """Return whether the role may join while the run ends: the store, which writes the ends.

    Its node may join, too, to start it if all processes had ended."""
    return ROLE_TABLE[role].joins_ending and state.phase == Phase.ENDING


def is_store_awaited(state: State) -> bool:
    """Return whether the store is lost, or about to be restarted, and has a time to come back."""
    return any(
        keys.rejoin_timer(name) in state.timers or keys.restart_key(name) in state.commands
        for name in indexes_of(state).roles.get(Role.STORE, ())
    )


def can_survive_restart(state: State, command: Command) -> bool:
    """Return whether a new process can carry out this order of its predecessor."""
    running = state.phase not in (Phase.STOPPING, Phase.ENDED)
    return running and isinstance(command, cmd.EndTrajectories)


def handle_store_lost(ctx: Context, name: str) -> None:
    """Suspend the deadlines of a lost store's orders."""
    for key in _list_store_orders(ctx.state, name):
        ctx.clear_timer(keys.deadline_timer(key))


def handle_store_joined(ctx: Context, actor: ActorState) -> None:
    """Readdress waiting orders to the new process; they are sent once it is accepted."""
    for key in _list_store_orders(ctx.state, actor.name):
        ctx.state.commands[key].incarnation = actor.incarnation


def handle_store_ready(ctx: Context, name: str) -> None:
    """Restart the deadlines of all that waited for the store, which can write again."""
    state = ctx.state
    for key in _list_store_orders(state, name):
        ctx.set_timer(
            keys.deadline_timer(key), END_TIMEOUT_MS + state.settings.disk_full_timeout_ms
        )
    for replica in state.replicas.values():
        replica.progress_ns = ctx.stamped.time_ns


def _list_store_orders(state: State, name: str) -> list[CommandKey]:
    kept = indexes_of(state).commands.get(name, ())
    return [key for key in kept if can_survive_restart(state, state.commands[key].command)]
