"""The node's side of a warm process: starts and restarts it, and has actors forked from it.

Reads   the answers of the warm process, its end
Writes  Launch messages, each with the descriptors of the actor's standard input and lock
Starts  python -m laminar.actors.system.warm_process
Gives   prestart_child, which starts a warm process; WarmProcess, one for as long as the node lives

The death of a warm process costs no actor: it is restarted, and pending requests go to its
successor. An actor that it had forked but not reported never begins.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from laminar.actors.system.roles import Needs
from laminar.actors.system.warm_process import Launch
from laminar.run.child_channel import ChildLost, Forked, Refused
from laminar.run.child_process import Child, ChildProcess, Spawned, spawn_child

FORK_S = 60.0
"""Time limit for a fork, normally milliseconds; a swapping machine may take 1000 times longer."""
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


def prestart_child(needs: Needs) -> Spawned:
    """Start a warm process with this environment and the needs; the user's values win.

    Signals that are ignored here (nohup) are ignored there.
    """
    environment = {"GLIBC_TUNABLES": COPY_TUNABLE, **needs.environment, **os.environ}
    module = "laminar.actors.system.warm_process"
    environment |= OWN_ENVIRONMENT
    return spawn_child(module, "", *needs.modules, environment=environment, descriptors=needs.fds)


class WarmProcess:
    """A warm process of one kind, and its successors."""

    def __init__(
        self, kind: str, needs: Needs, log: Any, *, ready_s: float, seed: Spawned | None = None
    ) -> None:
        """Start nothing yet; `ready_s`: limit for its imports. `seed`: a prestarted one."""
        self.kind = kind
        self.note = ""  #: for people: why nothing is preloaded
        self._needs = needs
        self._log, self._ready_s, self._seed = log, ready_s, seed
        self._process: Child | None = None
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
        seed, self._seed = self._seed or prestart_child(self._needs), None
        self._process = Child(seed, Forked)
        self._ready = asyncio.ensure_future(self._until_ready(self._process))
        self._watcher = asyncio.ensure_future(self._watch_process(self._process))

    async def fork_actor(self, launch: Launch, stdin: int, lock_fd: int) -> ChildProcess:
        """Fork an actor's process, a child of this one; RuntimeError if that is impossible."""
        below = self._needs.environment
        its_own = {name: os.environ.get(name, below.get(name)) for name in OWN_ENVIRONMENT}
        launch = msgspec.structs.replace(launch, environment=its_own | launch.environment)
        async with self._using:
            for _ in range(TRIES):
                self.ensure_started()
                try:
                    return await self._request_fork(launch, [stdin, lock_fd])
                except ChildLost as error:
                    reason = str(error)
                    await self._end_process()
            raise RuntimeError(
                f"the warm process ({self.kind}) failed {TRIES} times in a row: {reason}"
            )

    async def close(self) -> None:
        """End the warm process; nothing is forked any more."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        await self._end_process()

    async def _until_ready(self, process: Child) -> None:
        facts = await process.await_ready(self._ready_s, None, "its imports did not end")
        self.note = facts["note"]
        self._log.info("warm", pid=process.pid, kind=self.kind, **facts)

    async def _request_fork(self, launch: Launch, fds: list[int]) -> ChildProcess:
        assert self._process is not None
        await self._ready
        try:
            answer = await self._process.channel.request_reply(launch, FORK_S, fds)
        except TimeoutError:
            raise ChildLost(f"it did not answer within {FORK_S:.0f} s (a fork)") from None
        if isinstance(answer, Refused):
            raise RuntimeError(f"{launch.name} cannot be started: {answer.reason}")
        return ChildProcess(answer.pid)

    async def _watch_process(self, process: Child) -> None:
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
        if process is not None:
            self._ready.cancel()
            await process.close(0.0)
