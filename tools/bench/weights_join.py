"""How soon a relay that joins has its first chunk, and its first version.

Reads   nothing
Gives   one JSON line: seconds from the offer to the slot, to the first chunk and to the whole
        version, for memory that nobody has touched yet, and to all memory; and of a second version,
        in the next slot

The predecessor is a process with the product's plane, the relay that joins is in this process:
its slots (actors/relay_slots.py) in /dev/shm and its plane, one hop over loopback.

    python tools/bench/weights_join.py [--mib 2048] [--slots 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from laminar.actors.relay_slots import CHAIN, RelaySlots
from laminar.weights.chain.core import PlaneOptions
from laminar.weights.chain.reports import Received, Report, SlotWanted
from laminar.weights.chain.upstream import Identity
from laminar.weights.machine import RelayMachine
from tools.bench.weights_relay import KEY, RUN, RelayProcess

CHUNK_BYTES = 4 << 20
DEADLINE_S = 120.0


class Joining:
    """A relay's slots and plane, and when things happened to them."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.machine = RelayMachine("bench", "join", "node", f"joining-{time.monotonic_ns()}")
        self.filling: asyncio.Task[None] | None = None
        versions = self.machine.versions
        limit = slots * slot_bytes
        self.slots = RelaySlots(self.machine.slots, slots, limit, versions, self._fill, sys.exit)
        identity = Identity(run=RUN, name="joining", incarnation=1, key=KEY)
        self.plane = self.machine.plane(identity, self._on_report, PlaneOptions())
        self.wanted = self.granted = 0.0
        self.received: asyncio.Queue[float] = asyncio.Queue()

    def _on_report(self, report: Report) -> None:
        if isinstance(report, SlotWanted):
            self._grant(report)
        elif isinstance(report, Received):
            self.slots.keep(CHAIN, report.slot, report.manifest)
            self.received.put_nowait(time.monotonic())

    def _grant(self, wanted: SlotWanted) -> None:
        self.wanted = time.monotonic()
        self.slots.make(wanted.nbytes)
        self.plane.grant(self.slots.grant_to(CHAIN))
        self.granted = time.monotonic()

    def _fill(self, work: Coroutine[Any, Any, None]) -> None:
        self.filling = asyncio.get_running_loop().create_task(work)

    async def memory_is_there(self) -> None:
        if self.filling is not None:
            await self.filling

    async def first_chunk(self) -> float:
        """When the first chunk was proved."""
        while self.plane.status().chunks_here == 0:
            await asyncio.sleep(0.001)
        return time.monotonic()


async def measure(slots: int, slot_bytes: int) -> dict[str, float]:
    joining = Joining(slots, slot_bytes)
    host, port = joining.plane.start("127.0.0.1")
    head = RelayProcess("head", slot_bytes, lambda v, view: view.fill(v), slots=3)
    try:
        await asyncio.to_thread(head.publish, 1, CHUNK_BYTES)
        await asyncio.to_thread(head.connect_to, 1, "joining", host, port)
        async with asyncio.timeout(DEADLINE_S):
            first = await joining.first_chunk()
            whole = await joining.received.get()
            offered = joining.wanted
            granted = joining.granted
            await joining.memory_is_there()
            filled = time.monotonic()
            _, begun = await asyncio.to_thread(head.publish, 2, CHUNK_BYTES)
            second = await joining.received.get()
        return {
            "slot_s": granted - offered,
            "first_chunk_s": first - offered,
            "first_version_s": whole - offered,
            "all_memory_s": filled - offered,
            "second_version_s": second - begun,
        }
    finally:
        await joining.machine.close()
        head.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=2048, help="of one slot")
    parser.add_argument("--slots", type=int, default=3)
    given = parser.parse_args()
    found = asyncio.run(measure(given.slots, given.mib << 20))
    rounded = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps({"mib": given.mib, "slots": given.slots, **rounded}))


if __name__ == "__main__":
    main()
