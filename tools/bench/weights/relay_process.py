"""Relay processes without a coordinator: the bulk plane with slots, controlled by a pipe.

Reads   calls of the parent process
Gives   RelayProcess; Happened, a report of a relay with its time

For benchmarks and tests of the plane with real processes and real sockets. Slots are shared memory
of the parent, which can read and corrupt them. Relays are forked, so that any function can fill a
version.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from laminar.weights.arena.region import Region
from laminar.weights.arena.slots import SlotTable
from laminar.weights.chain.core import PlaneOptions
from laminar.weights.chain.reports import Received, Report, SlotReturned, SlotWanted
from laminar.weights.chain.transfer_thread import Plane
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.version import copy
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import compute_checksums
from laminar.weights.version.table import VersionTable

RUN = "bench"
KEY = b"the key of the run"
ANSWER_S = 60.0
SLOTS = 3
Fill = Callable[[int, np.ndarray], None]  #: (version, bytes of a slot)
_MADV_POPULATE_WRITE = 23  # not defined in Python's mmap


@dataclass(frozen=True, slots=True)
class Happened:
    """A report with the time.monotonic() of its arrival."""

    at: float
    report: Report


def describe(version: int, content: Any, chunk_bytes: int, digest: str = "") -> mf.Manifest:
    """Return the manifest of this content as one bfloat16 tensor."""
    view = np.frombuffer(content, np.uint8)
    checksums, found = compute_checksums(view, view.nbytes, chunk_bytes)
    return mf.Manifest(
        version=version,
        step=version,
        kind="full",
        dtype="bfloat16",
        total_bytes=view.nbytes,
        tensors=mf.make_layout([("weights", (view.nbytes // 2,))], "bfloat16"),
        chunk_bytes=chunk_bytes,
        probe=None,
        chunk_checksums=tuple(checksums),
        digest=digest or found,
    )


def digest_of(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class RelayProcess:
    """A relay in a separate process; calls wait for its result."""

    def __init__(
        self,
        name: str,
        slot_bytes: int,
        fill: Fill,
        *,
        host: str = "127.0.0.1",
        incarnation: int = 1,
        run: str = RUN,
        options: PlaneOptions | None = None,
        time_hashes: bool = False,
    ) -> None:
        """Start it; `time_hashes`: measure hashing."""
        context = mp.get_context("fork")
        self.name = name
        self.happened: list[Happened] = []
        files = [os.memfd_create(f"{name}-{slot}") for slot in range(SLOTS)]
        for file in files:
            os.truncate(file, slot_bytes)
        self.memory = [mmap.mmap(file, slot_bytes) for file in files]
        self._pipe, theirs = context.Pipe()
        identity = RelayIdentity(run=run, name=name, incarnation=incarnation, key=KEY)
        stub = _Stub(identity, self.memory, files, fill, options or PlaneOptions())

        def main() -> None:
            if time_hashes:
                mock.patch.object(copy, "xxhash", stub.hashes).start()
            self._pipe.close()
            stub.main(theirs, host)

        self._process = context.Process(target=main, name=name, daemon=True)
        self._process.start()
        theirs.close()
        for file in files:
            os.close(file)
        self.host, self.port = self._call("start")

    def set_successor(self, chain: int, successor: RelayProcess | None) -> None:
        where = None if successor is None else (successor.name, successor.host, successor.port)
        self._call("set_successor", chain, where)

    def connect_to(self, chain: int, name: str, host: str, port: int) -> None:
        """Take any listener at that address for the successor."""
        self._call("set_successor", chain, (name, host, port))

    def fetch(self, version: int, holder: RelayProcess) -> None:
        """Fetch a version outside the chain and forget it on arrival."""
        self._call("fetch", version, (holder.name, holder.host, holder.port))

    def publish(self, version: int, chunk_bytes: int) -> tuple[str, float]:
        """Fill, hash and publish a slot; return its digest and the time of the publish."""
        answer: tuple[str, float] = self._call("publish", version, chunk_bytes)
        return answer

    def held(self) -> tuple[int, ...]:
        """Return the complete versions; what was reported before has happened."""
        answer: tuple[int, ...] = self._call("held")
        return answer

    def usage(self) -> tuple[float, float]:
        """Return the CPU seconds of the transfer thread and, with `time_hashes`, its hashing."""
        answer: tuple[float, float] = self._call("usage")
        return answer

    def wait_for(
        self, wanted: Callable[[Report], bool], timeout_s: float = ANSWER_S, since: float = 0.0
    ) -> Happened:
        """Wait for the first wanted report at or after time `since`; raise TimeoutError."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            for happened in self.happened[seen:]:
                if happened.at >= since and wanted(happened.report):
                    return happened
            seen = len(self.happened)
            self._next_report(deadline)

    def received(self, version: int, timeout_s: float = ANSWER_S) -> Happened:
        """Wait until this version is complete and return its report."""
        return self.wait_for(
            lambda r: isinstance(r, Received) and r.manifest.version == version, timeout_s
        )

    def bytes_of(self, slot: int) -> memoryview:
        return memoryview(self.memory[slot])

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        if self._process.is_alive():
            self._call("close")
            self._process.join(ANSWER_S)
        self._pipe.close()

    def _call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        while True:
            kind, value = self._receive(time.monotonic() + ANSWER_S)
            if kind == "answer":
                return value
            self.happened.append(value)

    def _next_report(self, deadline: float) -> None:
        kind, value = self._receive(deadline)
        assert kind == "report", kind
        self.happened.append(value)

    def _receive(self, deadline: float) -> tuple[str, Any]:
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            said = "\n".join(str(h.report)[:300] for h in self.happened[-20:])
            raise TimeoutError(f"{self.name} did not send the expected report, but:\n{said}")
        message: tuple[str, Any] = self._pipe.recv()
        return message


class _TimedHashes:
    """The xxhash functions that the plane uses, with the CPU seconds they take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[[Any], Any], data: Any) -> Any:
        begun = time.thread_time()
        result = function(data)
        self.seconds += time.thread_time() - begun
        return result

    def xxh3_64_intdigest(self, data: Any) -> int:
        return int(self.timed(xxhash.xxh3_64_intdigest, data))

    def xxh3_128(self) -> _TimedHasher:
        return _TimedHasher(self)


class _TimedHasher:
    def __init__(self, clock: _TimedHashes) -> None:
        self._clock, self._hasher = clock, xxhash.xxh3_128()
        self.hexdigest = self._hasher.hexdigest

    def update(self, data: Any) -> None:
        self._clock.timed(self._hasher.update, data)


class _Stub:
    """A relay actor reduced to its plane and slots; runs in the child process."""

    def __init__(
        self,
        identity: RelayIdentity,
        memory: list[mmap.mmap],
        files: list[int],
        fill: Fill,
        options: PlaneOptions,
    ) -> None:
        self.identity, self.memory, self.files = identity, memory, files
        self.fill, self.options = fill, options
        self.todo: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.hashes = _TimedHashes()
        self.slot_due = False
        self.table = VersionTable(threading.Lock())

    def main(self, pipe: Any, host: str) -> None:
        for slot in self.memory:
            slot.madvise(_MADV_POPULATE_WRITE)
        self.plane = Plane(
            self.identity,
            lambda slot: Region(memoryview(self.memory[slot]), self.files[slot]),
            lambda report: self.todo.put(("report", Happened(time.monotonic(), report))),
            self.options,
            self.table,
        )
        self.slots = SlotTable(len(self.memory), self.table.try_forget)
        self.host = host
        threading.Thread(target=self._take_calls, args=(pipe,), daemon=True).start()
        while True:
            kind, value = self.todo.get()
            if kind == "report":
                self._handle(value.report)
                pipe.send((kind, value))
            else:
                method, args = value
                pipe.send(("answer", getattr(self, f"do_{method}")(*args)))
                if method == "close":
                    return
            self._grant_due()

    def _take_calls(self, pipe: Any) -> None:
        try:
            while True:
                self.todo.put(("call", pipe.recv()))
        except EOFError:
            self.todo.put(("call", ("close", ())))

    def _handle(self, report: Report) -> None:
        if isinstance(report, SlotWanted) and report.fetched:
            grant = self.slots.grant_slot("fetch")
            self.plane.fetch_into(-1 if grant is None else grant.slot)
        elif isinstance(report, SlotWanted):
            self.slot_due = True
        elif isinstance(report, SlotReturned):
            state = self.slots.get_state(report.slot)
            self.slots.abandon_slot(getattr(state, "writer", ""))
        elif isinstance(report, Received):
            self._received(report.slot, report.manifest.version, report.fetched)

    def _received(self, slot: int, version: int, fetched: bool) -> None:
        writer = getattr(self.slots.get_state(slot), "writer", "")
        if not fetched and version > (-1 if self.slots.latest is None else self.slots.latest):
            self.slots.commit(slot, writer, version)
        elif self.table.try_forget(version):
            self.slots.abandon_slot(writer)

    def _grant_due(self) -> None:
        """Grant the pending slot request if a slot has become free."""
        if self.slot_due:
            grant = self.slots.grant_slot("plane")
            if grant is not None:
                self.slot_due = False
                self.plane.grant_slot(grant.slot)

    def do_start(self) -> tuple[str, int]:
        return self.plane.start(self.host)

    def do_set_successor(self, chain: int, successor: tuple[str, str, int] | None) -> None:
        self.plane.set_successor(chain, successor)

    def do_fetch(self, version: int, holder: tuple[str, str, int]) -> None:
        self.plane.fetch(version, holder)

    def do_publish(self, version: int, chunk_bytes: int) -> tuple[str, float]:
        slot = self._filled("trainer", version)
        view = memoryview(self.memory[slot])
        manifest = describe(version, view, chunk_bytes)
        self.slots.commit(slot, "trainer", version)
        at = time.monotonic()
        self.plane.publish_version(manifest, slot)
        return manifest.digest, at

    def do_held(self) -> tuple[int, ...]:
        return tuple(sorted(self.table.get_complete_digests()))

    def do_usage(self) -> tuple[float, float]:
        mover = next(t for t in threading.enumerate() if t.name == "bulk-plane")
        assert mover.ident is not None
        clock = time.pthread_getcpuclockid(mover.ident)
        return time.clock_gettime(clock), self.hashes.seconds

    def do_close(self) -> None:
        self.plane.close()

    def _filled(self, writer: str, version: int) -> int:
        grant = self.slots.grant_slot(writer)
        assert grant is not None, self.slots
        self.fill(version, np.frombuffer(self.memory[grant.slot], np.uint8))
        return grant.slot
