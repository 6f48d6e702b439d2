"""The store's restart: the orders that it was given outlive its process.

Reads   losses of the store, and readiness of its next process
Writes  to whom its outstanding orders are addressed, their deadlines, its time to return
Emits   nothing: the coordinator sends what is outstanding to each process that it accepts

Whatever the store has acknowledged is on disk, so a new process goes on where the last one ended.
Its clients ask it again by themselves; only the coordinator's orders are looked after here. Nobody
is to blame meanwhile: no replica stalls and no batch gives up what it waits for.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.keys import CommandKey
from laminar.core.state.state import Actor, State
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events.base import Command
from laminar.names.roles import Role

END_TIMEOUT_MS = 120_000
"""One transaction of the store; two minutes of silence mean that it hangs, or waits for a disk."""


def may_join(state: State, role: str) -> bool:
    """While the run ends, the store is still needed: it writes the ends. So is the node that starts
    it, where all processes had ended."""
    return role in (Role.STORE, Role.NODE) and state.phase == Phase.ENDING


def is_store_awaited(state: State) -> bool:
    """Whether the store is lost, or about to be restarted, and has a time to come back."""
    return any(
        keys.rejoin_timer(name) in state.timers or keys.restart_key(name) in state.commands
        for name in indexes_of(state).roles.get(Role.STORE, ())
    )


def can_survive_restart(state: State, command: Command) -> bool:
    """Whether this order outlives the process that it was given to: a new one carries it out."""
    running = state.phase not in (Phase.STOPPING, Phase.ENDED)
    return running and isinstance(command, cmd.EndTrajectories)


def handle_store_lost(ctx: Context, name: str) -> None:
    """The store is lost: its orders wait, and it has the time of a start to return."""
    for key in _list_store_orders(ctx.state, name):
        ctx.clear_timer(keys.deadline_timer(key))
    if ctx.state.phase not in (Phase.STOPPING, Phase.ENDED):
        ctx.set_timer(keys.rejoin_timer(name), ctx.state.settings.start_timeout_ms)


def handle_store_joined(state: State, actor: Actor) -> None:
    """What waits is sent to the new process as soon as it is accepted."""
    if actor.role == Role.STORE:
        for key in _list_store_orders(state, actor.name):
            state.commands[key].incarnation = actor.incarnation


def handle_store_ready(ctx: Context, name: str) -> None:
    """The store can write: who waited for it, and what it is to do, has its whole time again."""
    state = ctx.state
    ctx.clear_timer(keys.rejoin_timer(name))
    for key in _list_store_orders(state, name):
        ctx.set_timer(keys.deadline_timer(key), END_TIMEOUT_MS + state.settings.disk_wait_ms)
    for replica in state.replicas.values():
        replica.progress_ns = ctx.stamped.time_ns


def _list_store_orders(state: State, name: str) -> list[CommandKey]:
    kept = indexes_of(state).commands.get(name, ())
    return [key for key in kept if can_survive_restart(state, state.commands[key].command)]
