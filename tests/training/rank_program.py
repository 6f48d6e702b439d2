"""A rank that does what its orders say, for tests of the gang: orders are words."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from laminar.config import ConfigError
from laminar.run.child_process import connect_parent
from laminar.training.rank_processes import RankLink
from laminar.training.ranks import RankStore
from laminar.training.trainer_state import CheckpointError
from tests.run.child_faults import act

LEASE_S = 2.0
ERRORS = {
    "bug": ValueError("a bug"),
    "config": ConfigError("the model is another"),
    "checkpoint": CheckpointError("the file is cut off"),
    "disk": OSError(28, "No space left on device"),
}


def main(fd: str, parent: str, mode: str, rank: str) -> None:
    end = connect_parent(fd, parent)
    begun, go = [], threading.Event()

    async def handle(order: bytes) -> bytes:
        word, _, number = order.decode().partition(" ")
        begun.append(word)
        if number in ("", rank):
            act(word)
            if word == "wait":
                await asyncio.to_thread(go.wait)
            elif word == "go":
                go.set()
            elif word == "store":
                value = await asyncio.to_thread(RankStore(int(rank), link.submit).get, "from")
                return f"{rank}: {value.decode()}".encode()
            elif word == "end":
                os._exit(7)
            elif word in ERRORS:
                raise ERRORS[word]
        return f"{rank}: {' '.join(begun)}".encode()

    if mode == "late":
        threading.Event().wait()
    link = RankLink(end, LEASE_S)
    asyncio.run(link.serve_orders(handle))


if __name__ == "__main__":
    main(*sys.argv[1:])
