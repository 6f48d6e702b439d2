"""Rewards for an asyncio process: a pool of worker processes behind `compute_rewards`.

Reads   RewardCall
Gives   RewardResult per response; raises RewardWorkerLost when the workers fail, ConfigError when
        the reward function does not load

Two kinds of failure must be distinguished. If a function raises or runs too long on a response, the
fault is the user's: that response gets `error_score` with its reason. If a worker dies (out of
memory, a crash, os._exit), nothing follows about the response: the worker is replaced and the call
retried, and after `max_retries` the caller learns that no score exists. The time limit is enforced
from outside by SIGKILL, the only sure way to end user code, to the worker and all its descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import msgspec

from laminar.config import ConfigError
from laminar.run.process_guard import guard_command
from laminar.tasks.pipe_frames import LENGTH, encode_frame
from laminar.tasks.rewards.results import (
    RewardCall,
    RewardResult,
    RewardSpec,
    RewardWorkerLost,
    apply_error_score,
)
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S
from laminar.tasks.rewards.worker import (
    STACK_SIGNAL,
    CallScored,
    WorkerReady,
    WorkerRefused,
    WorkerStart,
)

LATE_S = 0.1  #: wait for a reply that was in the pipe before the timeout or the worker's end
STACK_S = 2.0  #: wait for the stack of a call that timed out
REAP_S = 5.0  #: wait for the end of a process that was told to end


Output = Callable[[bytes], object]  #: callback for the output of workers


class RewardPool:
    """A pool of worker processes that score calls in the order of arrival.

    Calls are not queued in workers: callers wait in line for a free worker, and cancelling a caller
    whose call is running kills the worker, so no worker runs needlessly.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        workers: int = 1,
        timeout_s: float = 30.0,
        error_score: float = 0.0,
        max_retries: int = 2,
        start_timeout_s: float = IMPORT_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        on_output: Output = len,
    ) -> None:
        """Create the pool; `env` is added to the workers' environment, times are in seconds.

        `on_output` gets the output of user code, in each worker's order; by default it is dropped.
        """
        self.workers_lost = 0  #: number of workers that died by themselves
        self.workers_killed = 0  #: number of workers killed because a call ran too long
        self._spec, self._timeout_s, self._error_score = spec, timeout_s, error_score
        self._attempts, self._start_timeout_s = 1 + max_retries, start_timeout_s
        self._env = {**os.environ, **(env or {})}
        self._on_output = on_output
        self._start = encode_frame(WorkerStart(spec))
        self._open = False
        self._workers: list[_Worker | None] = [None] * workers
        self._free = list(range(workers))  # slots
        self._turn = asyncio.Semaphore(workers)  # FIFO, unlike Queue.get

    async def start(self) -> None:
        """Start all workers and wait until each has its scorer open.

        Raises ConfigError if the scorer does not load, RewardWorkerLost if a worker dies first.
        """
        found = await asyncio.gather(*map(self._ensure_worker, self._free), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                await self.close()
                if isinstance(error, _WorkerDied):
                    raise RewardWorkerLost(f"a reward worker could not start: {error}")
                raise error
        self._open = True

    async def compute_rewards(self, call: RewardCall) -> list[RewardResult]:
        """Return a result per completion, in order; raise RewardWorkerLost.

        With scope trajectory, each completion is a separate call with its own time limit.
        """
        calls = [call]
        if self._spec.scope == "trajectory":
            calls = [RewardCall(call.row, [one], call.step) for one in call.completions]
        parts = await asyncio.gather(*map(self._score_call, calls))
        return [result for part in parts for result in part]

    async def close(self) -> None:
        """End all workers; calls that wait or do not finish immediately raise RewardWorkerLost."""
        self._open = False
        await asyncio.gather(*(worker.close() for worker in self._workers if worker))
        await asyncio.gather(*(self._turn.acquire() for _ in self._workers))  # behind all callers
        await asyncio.gather(*map(self._drop_worker, self._free))
        for _ in self._workers:
            self._turn.release()

    async def _score_call(self, call: RewardCall) -> list[RewardResult]:
        self._check_open()
        async with self._turn:
            slot = self._free.pop()
            try:
                return await self._run_call(slot, call)
            except BaseException:
                await self._drop_worker(slot)  # a late reply must not reach the next call
                raise
            finally:
                self._free.append(slot)

    async def _run_call(self, slot: int, call: RewardCall) -> list[RewardResult]:
        request, reason = encode_frame(call), ""
        for attempt in range(1, self._attempts + 1):
            self._check_open()
            try:
                worker = await self._ensure_worker(slot)
                self._check_open()
                body = await worker.exchange_frames(request, self._timeout_s)
                if body is None:
                    body = await worker.last_words()
            except (
                _WorkerDied,
                ConfigError,
            ) as error:  # ConfigError: the file has changed since start
                self.workers_lost += 1
                await self._drop_worker(slot)
                reason = f"the reward worker was lost {attempt} times; last reason: {error}"
                continue
            if body is None:
                self.workers_killed += 1
                await self._drop_worker(slot)
                detail = f"no result within {self._timeout_s:g} s"
                return [RewardResult(self._error_score, "timeout", detail)] * len(call.completions)
            reply = msgspec.msgpack.decode(body, type=CallScored)
            return [apply_error_score(result, self._error_score) for result in reply.results]
        self._check_open()
        raise RewardWorkerLost(reason)

    def _check_open(self) -> None:
        if not self._open:
            raise RewardWorkerLost("the reward pool is not running")

    async def _ensure_worker(self, slot: int) -> _Worker:
        """Return the worker of a slot, starting one if needed; raise _WorkerDied, ConfigError."""
        worker = self._workers[slot]
        if worker is not None and not worker.ended:
            return worker
        await self._drop_worker(slot)
        worker = self._workers[slot] = await _Worker.spawn(self._env, self._on_output)
        body = await worker.exchange_frames(self._start, self._start_timeout_s)
        if body is None:
            raise _WorkerDied(f"its scorer did not load within {self._start_timeout_s:g} s")
        reply: WorkerReady | WorkerRefused = msgspec.msgpack.decode(
            body, type=WorkerReady | WorkerRefused
        )
        if isinstance(reply, WorkerRefused):
            raise ConfigError(reply.reason)
        return worker

    async def _drop_worker(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            await worker.kill()


class _WorkerDied(Exception):
    """The end of a worker before its reply."""


class _Worker(asyncio.SubprocessProtocol):
    """A child process with a frame in, a frame out, and notice of its end.

    Not built on asyncio's streams, since Process.wait() returns only when the pipes are closed too,
    which a process forked by the user's function can delay forever.
    """

    def __init__(self, on_output: Output) -> None:
        loop = asyncio.get_running_loop()
        self.ended = False
        self._on_output = on_output
        self._printed = 0  #: number of bytes printed
        self._buffer = bytearray()
        self._reply: asyncio.Future[bytes | None] = loop.create_future()
        self._exited: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def spawn(cls, env: Mapping[str, str], on_output: Output) -> _Worker:
        command = guard_command(0, "laminar.tasks.rewards.worker")
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            partial(cls, on_output), *command, env=env, start_new_session=True
        )
        return worker

    async def exchange_frames(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a frame and return the reply, or None after the timeout; raise _WorkerDied."""
        if self.ended:
            raise _WorkerDied(await self._get_exit_reason())
        self._reply = asyncio.get_running_loop().create_future()
        self._stdin.write(request)
        return await self._wait_for_reply(timeout_s)

    async def last_words(self) -> bytes | None:
        """Have a worker that timed out print its stack; return a reply that was under way."""
        with contextlib.suppress(ProcessLookupError):
            if not self._exited.done():
                os.kill(self._pid, STACK_SIGNAL)
        before, deadline = self._printed, time.monotonic() + STACK_S
        body = None
        while body is None and time.monotonic() < deadline:
            printed = self._printed
            body = await self._wait_for_reply(LATE_S)
            if before < self._printed == printed:
                break  # the output has ended
        return body

    async def _wait_for_reply(self, timeout_s: float) -> bytes | None:
        await asyncio.wait({self._reply}, timeout=timeout_s)
        if not self._reply.done():
            return None
        body = self._reply.result()
        if body is None:
            raise _WorkerDied(await self._get_exit_reason())
        return body

    async def kill(self) -> None:
        """Have the guard kill the worker and what user code has started, and reap the guard."""
        with contextlib.suppress(ProcessLookupError):
            if not self._exited.done():
                os.kill(self._pid, signal.SIGTERM)
        try:
            await asyncio.wait({self._exited}, timeout=REAP_S)
        finally:
            if not self._exited.done():
                self._kill_group()
            self._transport.close()

    async def close(self) -> None:
        """Let an idle worker exit by itself, then kill it."""
        self._stdin.close()
        await asyncio.wait({self._exited}, timeout=REAP_S)
        await self.kill()

    def _kill_group(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    async def _get_exit_reason(self) -> str:
        await self.kill()
        code = self._transport.get_returncode()
        if code is None:
            return "it closed its channel"
        if code < 0:
            return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"it ended with exit code {code}"

    # --- callbacks of asyncio -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        self._pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._printed += len(data)
            self._on_output(data)
            return
        self._buffer += data
        if len(self._buffer) < LENGTH.size:
            return
        end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) >= end:
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            if not self._reply.done():
                self._reply.set_result(body)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:  # every byte before the end has been delivered
            self._mark_ended()

    def process_exited(self) -> None:
        self._kill_group()  # processes left by user code; the id may be reused later
        self._exited.set_result(None)
        asyncio.get_running_loop().call_later(LATE_S, self._mark_ended)

    def _mark_ended(self) -> None:
        self.ended = True
        if not self._reply.done():
            self._reply.set_result(None)
