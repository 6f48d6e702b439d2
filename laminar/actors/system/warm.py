"""The node's side of a warm process: starts and restarts it, and has actors forked from it.

Reads   the answers of the warm process, its end
Writes  Launch messages, each with the descriptors of the actor's standard input and lock
Starts  python -m laminar.actors.system.warm_process
Gives   PrestartedProcess, a warm process that has been started; WarmProcess, one for as long as the
        node lives

The death of a warm process costs no actor: it is restarted, and pending requests go to its
successor. An actor that it had forked but not reported never begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from laminar.actors.system.child_process import ForkedProcess
from laminar.actors.system.roles import Needs
from laminar.actors.system.warm_process import (
    MESSAGE_MAX,
    Answer,
    Forked,
    ForkRefused,
    Launch,
    WarmReady,
)

FORK_S = 60.0
"""Time limit for a fork, normally milliseconds; a swapping machine may take 1000 times longer."""
CLOSE_S = 2.0
TRIES = 3  #: warm processes tried per actor: an import that crashes would crash again
OWN_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts threads when it is imported
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else asking whether there is a GPU opens it
}
"""Variables of the warm process only; its children get their own values."""
COPY_TUNABLE = "glibc.cpu.x86_non_temporal_threshold=262144"
"""Makes copies of single tensors bypass the cache, which would nearly halve their speed.

The default threshold of glibc grows with the cache size that a virtual machine reports.
"""
_CHILD_FD = 3


@dataclass(frozen=True)
class PrestartedProcess:
    """A warm process that imports or waits, and the node's end of its socket."""

    pid: int
    socket: socket.socket

    @classmethod
    def spawn(cls, needs: Needs) -> PrestartedProcess:
        """Start a warm process with this environment and the needs; the user's values win.

        Signals that are ignored here (nohup) are ignored there.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [sys.executable, "-m", "laminar.actors.system.warm_process", str(_CHILD_FD), ""]
        all_of_it = {"GLIBC_TUNABLES": COPY_TUNABLE, **needs.environment, **os.environ}
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [*program, *needs.modules],
                all_of_it | OWN_ENVIRONMENT,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), _CHILD_FD),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        ours.setblocking(False)
        return cls(pid, ours)


class WarmProcess:
    """A warm process of one kind, and its successors."""

    def __init__(
        self,
        kind: str,
        needs: Needs,
        log: Any,
        *,
        ready_s: float,
        seed: PrestartedProcess | None = None,
    ) -> None:
        """Start nothing yet; `ready_s`: limit for its imports. `seed`: a prestarted one."""
        self.kind = kind
        self.note = ""  #: for people: why nothing is preloaded
        self._needs = needs
        self._log, self._ready_s, self._seed = log, ready_s, seed
        self._process: ForkedProcess | None = None
        self._socket: socket.socket | None = None
        self._using = asyncio.Lock()  #: held during each request
        self._closed = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the present warm process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def ensure_started(self) -> None:
        """Start the process unless it runs; it imports while other processes work."""
        if self._process is not None or self._closed:
            return
        seed, self._seed = self._seed or PrestartedProcess.spawn(self._needs), None
        self._socket, self._process = seed.socket, ForkedProcess(seed.pid)
        self._ready = asyncio.ensure_future(self._until_ready(seed.socket))
        self._watcher = asyncio.ensure_future(self._watch_process(self._process))

    async def fork_actor(self, launch: Launch, stdin: int, lock_fd: int) -> ForkedProcess:
        """Fork an actor's process, a child of this one; RuntimeError if that is impossible."""
        below = self._needs.environment
        its_own = {name: os.environ.get(name, below.get(name)) for name in OWN_ENVIRONMENT}
        launch = msgspec.structs.replace(launch, environment=its_own | launch.environment)
        async with self._using:
            for _ in range(TRIES):
                self.ensure_started()
                try:
                    return await self._request_fork(launch, [stdin, lock_fd])
                except _WarmProcessLost as error:
                    reason = str(error)
                    await self._end_process()
            raise RuntimeError(f"the warm process ({self.kind}) {reason}, {TRIES} times in a row")

    async def close(self) -> None:
        """End the warm process; nothing is forked any more."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        await self._end_process()

    async def _until_ready(self, warm: socket.socket) -> None:
        answer = await self._read_answer(warm, self._ready_s, "its imports")
        assert isinstance(answer, WarmReady)
        self.note = answer.note
        facts = {"kind": self.kind, "seconds": round(answer.seconds, 2), "missing": answer.missing}
        self._log.info("warm", pid=self.pid, note=answer.note, **facts)

    async def _request_fork(self, launch: Launch, fds: list[int]) -> ForkedProcess:
        assert self._socket is not None
        await self._ready
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(launch)], fds)
        except OSError as error:
            raise _WarmProcessLost(f"accepts no launch: {error.strerror}") from None
        answer = await self._read_answer(self._socket, FORK_S, "a fork")
        if isinstance(answer, ForkRefused):
            raise RuntimeError(f"{launch.name} cannot be started: {answer.reason}")
        assert isinstance(answer, Forked)
        return ForkedProcess(answer.pid)

    async def _read_answer(self, warm: socket.socket, seconds: float, what: str) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            body = await asyncio.wait_for(loop.sock_recv(warm, MESSAGE_MAX), seconds)
        except TimeoutError:
            raise _WarmProcessLost(f"did not answer within {seconds:.0f} s ({what})") from None
        except OSError as error:
            raise _WarmProcessLost(f"is gone: {error.strerror}") from None
        if not body:
            raise _WarmProcessLost(await self._find_exit_cause())
        answer: Answer = msgspec.msgpack.decode(body, type=Answer)
        return answer

    async def _find_exit_cause(self) -> str:
        """Describe the end of a warm process that has closed its socket."""
        assert self._process is not None
        try:
            return f"ended with code {await asyncio.wait_for(self._process.wait(), CLOSE_S)}"
        except TimeoutError:
            return "closed its socket"

    async def _watch_process(self, process: ForkedProcess) -> None:
        """Restart a warm process that had worked, before it is needed again."""
        code = await process.wait()
        self._log.warning("warm-process-ended", kind=self.kind, pid=process.pid, code=code)
        if self._ready.done() and not self._ready.cancelled() and not self._ready.exception():
            async with self._using:
                if self._process is process:
                    await self._end_process()
                    self.ensure_started()

    async def _end_process(self) -> None:
        """End the present warm process, which ends with its socket."""
        process, self._process = self._process, None
        if process is None or self._socket is None:
            return
        self._ready.cancel()
        self._socket.close()
        process.kill()
        await process.wait()


class _WarmProcessLost(Exception):
    """The warm process does not answer."""
