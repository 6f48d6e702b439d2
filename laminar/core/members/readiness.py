"""Readiness: processes that have joined report that they can work.

Reads   ReplicaReady, RelayReady, DataLoaded
Writes  actor.ready, state.replicas, state.num_train, state.num_eval; relays join the chain
Emits   nothing itself: the planner acts on the new possibilities

Trainer readiness, which may require repeating logged steps, is in step_replay.py.
"""

from __future__ import annotations

from laminar.core import store_orders
from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.state import forks, keys
from laminar.core.state.indexes import add_replica, master_relay
from laminar.core.state.state import RepackState, Replica, State
from laminar.core.validation import COUNT_MAX, ROWS_MAX, accept_any
from laminar.core.versions import broadcast, publishing
from laminar.events import events as ev
from laminar.names.roles import Role


def _can_hold_group(state: State, event: ev.ReplicaReady) -> bool:
    """Return whether a replica can hold a group; else it would wait for work that never fits."""
    return state.settings.group_size <= event.max_num_seqs <= COUNT_MAX


@handles(ev.ReplicaReady, valid=_can_hold_group)
def on_replica_ready(ctx: Context, event: ev.ReplicaReady) -> None:
    """Register a replica whose engine can take work once it has weights."""
    state, name = ctx.state, ctx.stamped.peer
    if not ctx.mark_ready():
        return
    node = state.actors[name].node
    replica = Replica(
        name=name,
        relay=broadcast.name_of(Role.RELAY, node),
        capacity=event.max_num_seqs,
        progress_ns=ctx.stamped.time_ns,
    )
    if state.settings.repack_policy:
        replica.repack = RepackState(
            max_batch=event.max_batch, kv_capacity=event.kv_capacity_tokens
        )
    add_replica(state, replica)
    if replica.relay not in state.relays and keys.rejoin_timer(replica.relay) not in state.timers:
        ctx.set_timer(keys.rejoin_timer(replica.relay), state.settings.start_timeout_ms)
    ctx.set_timer(keys.progress_timer(name), state.settings.stall_ms)
    ctx.touch_replica(name)


@handles(ev.RelayReady, valid=accept_any)
def on_relay_ready(ctx: Context, event: ev.RelayReady) -> None:
    """Put a relay into the chain; the head of the chain needs the trainer's current weights."""
    if ctx.mark_ready():
        relay = broadcast.add_relay(ctx, ctx.state.actors[ctx.stamped.peer], event.chain_address)
        if relay is master_relay(ctx.state):
            publishing.owe_republish(ctx)


def _row_counts(state: State, event: ev.DataLoaded) -> bool:
    """Return whether the row counts are possible; only a run without steps can have no rows."""
    least = 1 if state.settings.total_steps else 0
    return least <= event.num_train <= ROWS_MAX and 0 <= event.num_eval <= ROWS_MAX


@handles(ev.DataLoaded, valid=_row_counts)
def on_data_loaded(ctx: Context, event: ev.DataLoaded) -> None:
    """Record the fixed number of prompts in the store; a restarted store refuses other data."""
    state = ctx.state
    if ctx.mark_ready():
        store_orders.handle_store_ready(ctx, ctx.stamped.peer)
    if state.num_train < 0:
        state.num_train, state.num_eval = event.num_train, event.num_eval
        forks.data_loaded(state, event)
