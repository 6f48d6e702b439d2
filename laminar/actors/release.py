"""Letting go of trajectories that go on on another replica, without losing a token.

Reads   ReleaseTrajectories, what runs here
Emits   TrajectoriesReleased

The engine stops first, then its last tokens go to the store: what it sampled after them would be
sampled again elsewhere. Meanwhile the coordinator may go on without waiting: what it takes back, or
orders anew under another placement, is then left as it is, and the report comes too late to count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from laminar.actors.host import Host
from laminar.actors.running import Running, request_id
from laminar.engines.protocol import ReplicaEngine
from laminar.events import commands as cmd
from laminar.events import events as ev


async def release(
    host: Host,
    engine: ReplicaEngine,
    running: dict[str, Running],
    flush: Callable[[], Awaitable[None]],
    order: cmd.Order,
    command: cmd.ReleaseTrajectories,
) -> None:
    """`flush`: the store has all tokens, and what has ended is reported, when it returns."""
    leaving = [
        found
        for item in command.items
        if (found := running.get(item.trajectory_id)) is not None
        and found.command.placement <= item.placement
    ]
    await asyncio.gather(*(engine.abort(request_id(item.command)) for item in leaving))
    await flush()
    for item in leaving:
        trajectory = item.command.trajectory_id
        if running.get(trajectory) is item:  # or else it has ended, or was taken back
            del running[trajectory]
    released = ev.TrajectoriesReleased(command_id=order.command_id)
    host.emit(released, event_seq=order.cause, trajectories=len(command.items))
