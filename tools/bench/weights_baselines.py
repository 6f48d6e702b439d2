"""Ways to bring bytes to other machines that a chain is compared with: one hop, a star, gloo.

Gives   Group; hop and star over plain sockets, gloo broadcasts; Round

A machine is a process with an address of its own (weights_net.py) and a buffer that its parent
sees. A group stays alive between rounds, so that connections are warm; machine 0 is the source.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tools.bench.weights_net import host

IO_BYTES = 1 << 20
"""Of one call; larger ones are no faster."""
GLOO_CHUNK_BYTES, GLOO_WINDOW = 4 << 20, 4
LIMIT_S = 300.0
_CONTEXT = mp.get_context("fork")
_MADV_POPULATE_WRITE = 23  # Python's mmap has no name for it

Once = Callable[[], None]
Machine = Callable[[int, memoryview], Once]  #: sets a machine up; gives what it does in a round


@dataclass(frozen=True, slots=True)
class Round:
    """One broadcast."""

    seconds: float  #: from the start at the source to the last byte at the last machine
    cpu_seconds: float  #: of all machines


def buffers(count: int, size: int) -> list[mmap.mmap]:
    """Memory that processes forked later share, with its pages in place."""
    made = [mmap.mmap(-1, size) for _ in range(count)]
    for buffer in made:
        buffer.madvise(_MADV_POPULATE_WRITE)
    return made


class Group:
    """The machines of one way to broadcast."""

    def __init__(self, machine: Machine, memory: list[mmap.mmap], sources: int = 1) -> None:
        """One machine for each buffer; the contents of the first, which the first `sources` have,
        go to all others."""
        self.memory, self.sources = memory, sources
        self._barrier = _CONTEXT.Barrier(len(memory) + 1)
        self._rounds = _CONTEXT.SimpleQueue()
        self._processes = [
            _CONTEXT.Process(target=self._main, args=(machine, index), daemon=True)
            for index in range(len(memory))
        ]
        for process in self._processes:
            process.start()

    def round(self) -> Round:
        """One broadcast. RuntimeError if the bytes did not arrive."""
        for buffer in self.memory[self.sources :]:
            buffer[:8] = bytes(8)
            buffer[-8:] = bytes(8)
        self._barrier.wait(LIMIT_S)
        taken = [self._rounds.get() for _ in self.memory]
        self._check()
        begun, ended = min(t[0] for t in taken), max(t[1] for t in taken)
        return Round(ended - begun, sum(t[2] for t in taken))

    def close(self) -> None:
        self._barrier.abort()
        for process in self._processes:
            process.join()

    def _check(self) -> None:
        source = np.frombuffer(self.memory[0], np.uint64)
        for index, buffer in enumerate(self.memory[1:], 1):
            if not np.array_equal(np.frombuffer(buffer, np.uint64), source):
                raise RuntimeError(f"machine {index} did not get the bytes of the source")

    def _main(self, machine: Machine, index: int) -> None:
        once = machine(index, memoryview(self.memory[index]))
        while True:
            try:
                self._barrier.wait(LIMIT_S)
            except threading.BrokenBarrierError:
                return
            cpu, begun = time.process_time(), time.monotonic()
            once()
            self._rounds.put((begun, time.monotonic(), time.process_time() - cpu))


def star(memory: list[mmap.mmap], check: Callable[[memoryview], Any] | None = None) -> Group:
    """The source sends to all others at once; to a single one that is the single hop.

    `check`: called by the receivers with every IO_BYTES that have come.
    """
    listener = socket.create_server((host(0), 0), backlog=len(memory))

    def machine(index: int, view: memoryview) -> Once:
        if index:
            sock = socket.create_connection(listener.getsockname(), source_address=(host(index), 0))
            return lambda: _take(sock, view, check)
        socks = [listener.accept()[0] for _ in memory[1:]]
        for sock in socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return lambda: _send_all(socks, view)

    group = Group(machine, memory)
    listener.close()
    return group


def gloo(memory: list[mmap.mmap], store_file: Path, *, chunked: bool) -> Group:
    """torch.distributed's broadcast, of the whole buffer or of chunks with some in flight.

    `store_file`: by which its processes find each other; must not exist.
    """
    size = len(memory)

    def machine(index: int, view: memoryview) -> Once:
        torch.set_num_threads(1)
        store = dist.FileStore(str(store_file), size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=LIMIT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host(index))]
        group = dist.ProcessGroupGloo(store, index, size, options)
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        pieces = tensor.split(GLOO_CHUNK_BYTES) if chunked else (tensor,)
        return lambda: _broadcast(group, pieces)

    return Group(machine, memory)


def _take(sock: socket.socket, view: memoryview, check: Callable[[memoryview], Any] | None) -> None:
    for start in range(0, view.nbytes, IO_BYTES):
        piece = rest = view[start : start + IO_BYTES]
        while rest.nbytes:
            count = sock.recv_into(rest)
            if not count:
                raise ConnectionError("the source is gone")
            rest = rest[count:]
        if check is not None:
            check(piece)


def _send_all(socks: list[socket.socket], view: memoryview) -> None:
    def send(sock: socket.socket) -> None:
        for start in range(0, view.nbytes, IO_BYTES):
            sock.sendall(view[start : start + IO_BYTES])

    threads = [threading.Thread(target=send, args=(sock,)) for sock in socks[1:]]
    for thread in threads:
        thread.start()
    send(socks[0])
    for thread in threads:
        thread.join()


def _broadcast(group: Any, pieces: tuple[torch.Tensor, ...]) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    flying: deque[Any] = deque()
    for piece in pieces:
        flying.append(group.broadcast([piece], options))
        if len(flying) >= GLOO_WINDOW:
            flying.popleft().wait()
    for work in flying:
        work.wait()
