"""A rank with planted bugs: it lives on when rank 0 is gone, and does what it was ordered to. It
stands still (SIGSTOP) before the first rows that it writes into a file."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from typing import Any

from laminar.actors.system import rank_process
from laminar.run.child_process import connect_parent
from laminar.training import shared_safetensors
from laminar.training.rank_processes import RankLink

_serve, _write = RankLink.serve_orders, shared_safetensors.write_rows


async def to_the_end(*args: Any) -> None:
    await _serve(*args)
    await asyncio.get_running_loop().shutdown_default_executor()


_first = threading.Lock()


def late(*args: Any) -> Any:
    """Stop at the first call; one in another thread waits, and does not stop the process again."""
    with _first:
        if shared_safetensors.write_rows is late:
            shared_safetensors.write_rows = _write
            signal.raise_signal(signal.SIGSTOP)  # of this thread, which goes no further
    return _write(*args)


rank_process.connect_parent = lambda fd, parent: connect_parent(fd, "0")  # type: ignore[attr-defined]
RankLink.serve_orders = to_the_end  # type: ignore[method-assign]
shared_safetensors.write_rows = late

if __name__ == "__main__":
    rank_process.main(*sys.argv[1:])
