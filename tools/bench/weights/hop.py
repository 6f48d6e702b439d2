"""Single hop over a plain socket, the baseline of a chain.

Gives   Hop; Round; buffers, its memory

A machine is a process with a separate address (network.py) and a buffer that it shares with its
parent. Both processes live across rounds, so that the connection is warm.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.bench.weights.network import host

IO_BYTES = 1 << 20  #: bytes of one call; larger calls are not faster
LIMIT_S = 300.0
_CONTEXT = mp.get_context("fork")
_MADV_POPULATE_WRITE = 23  # not defined in Python's mmap

Check = Callable[[memoryview], Any]


@dataclass(frozen=True, slots=True)
class Round:
    """Times of one transfer."""

    seconds: float  #: from its start at the source to the last byte at the other machine
    cpu_seconds: float  #: CPU seconds of both machines


def buffers(size: int) -> list[mmap.mmap]:
    """Allocate the memory of two machines, with all pages populated."""
    made = [mmap.mmap(-1, size) for _ in range(2)]
    for buffer in made:
        buffer.madvise(_MADV_POPULATE_WRITE)
    return made


class Hop:
    """The source and target of the transfers."""

    def __init__(self, memory: list[mmap.mmap], check: Check | None = None) -> None:
        """Start both processes; the receiver calls `check` with every IO_BYTES received."""
        self._memory = memory
        self._barrier = _CONTEXT.Barrier(3)
        self._rounds = _CONTEXT.SimpleQueue()
        listener = socket.create_server((host(0), 0))
        self._processes = [
            _CONTEXT.Process(target=self._send, args=(listener,), daemon=True),
            _CONTEXT.Process(
                target=self._receive, args=(listener.getsockname(), check), daemon=True
            ),
        ]
        for process in self._processes:
            process.start()
        listener.close()

    def round(self) -> Round:
        """Make one transfer; raise RuntimeError if the bytes did not arrive."""
        source, target = self._memory
        target[:8] = target[-8:] = bytes(8)
        self._barrier.wait(LIMIT_S)
        taken = [self._rounds.get() for _ in self._processes]
        if not np.array_equal(np.frombuffer(target, np.uint64), np.frombuffer(source, np.uint64)):
            raise RuntimeError("the bytes of the source did not arrive")
        begun, ended = min(t[0] for t in taken), max(t[1] for t in taken)
        return Round(ended - begun, sum(t[2] for t in taken))

    def close(self) -> None:
        self._barrier.abort()
        for process in self._processes:
            process.join()

    def _send(self, listener: socket.socket) -> None:
        sock, view = listener.accept()[0], memoryview(self._memory[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def once() -> None:
            for start in range(0, view.nbytes, IO_BYTES):
                sock.sendall(view[start : start + IO_BYTES])

        self._rounds_of(once)

    def _receive(self, source: tuple[str, int], check: Check | None) -> None:
        sock = socket.create_connection(source, source_address=(host(1), 0))
        view = memoryview(self._memory[1])
        self._rounds_of(lambda: _take(sock, view, check))

    def _rounds_of(self, once: Callable[[], None]) -> None:
        while True:
            try:
                self._barrier.wait(LIMIT_S)
            except threading.BrokenBarrierError:
                return
            cpu, begun = time.process_time(), time.monotonic()
            once()
            self._rounds.put((begun, time.monotonic(), time.process_time() - cpu))


def _take(sock: socket.socket, view: memoryview, check: Check | None) -> None:
    for start in range(0, view.nbytes, IO_BYTES):
        piece = rest = view[start : start + IO_BYTES]
        while rest.nbytes:
            count = sock.recv_into(rest)
            if not count:
                raise ConnectionError("the source closed the connection")
            rest = rest[count:]
        if check is not None:
            check(piece)
