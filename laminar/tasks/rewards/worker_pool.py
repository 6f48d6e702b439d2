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
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from laminar.config import ConfigError
from laminar.run.child_channel import ChildLost
from laminar.run.child_process import Child, Output, spawn_child
from laminar.tasks.rewards.results import (
    RewardCall,
    RewardResult,
    RewardSpec,
    RewardWorkerLost,
    apply_error_score,
)
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S
from laminar.tasks.rewards.worker import STACK_SIGNAL, CallScored

LATE_S = 0.1  #: wait for a reply that was in the channel before the timeout
STACK_S = 2.0  #: wait for the stack of a call that timed out


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
        self._open = False
        self._workers: list[Child | None] = [None] * workers
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
                if isinstance(error, ChildLost):
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
        reason = ""
        for attempt in range(1, self._attempts + 1):
            self._check_open()
            try:
                worker = await self._ensure_worker(slot)
                self._check_open()
                reply = await self._ask_worker(worker, call)
            except (ChildLost, ConfigError) as error:  # ConfigError: the file has changed
                self.workers_lost += 1
                await self._drop_worker(slot)
                reason = f"the reward worker was lost {attempt} times; last reason: {error}"
                continue
            if reply is None:
                self.workers_killed += 1
                await self._drop_worker(slot)
                detail = f"no result within {self._timeout_s:g} s"
                return [RewardResult(self._error_score, "timeout", detail)] * len(call.completions)
            return [apply_error_score(result, self._error_score) for result in reply.results]
        self._check_open()
        raise RewardWorkerLost(reason)

    async def _ask_worker(self, worker: Child, call: RewardCall) -> CallScored | None:
        """Return the reply; None after the timeout, once the worker has printed its stack."""
        with suppress(TimeoutError):
            reply: CallScored = await worker.channel.request_reply(call, self._timeout_s)
            return reply
        worker.send_signal(STACK_SIGNAL)
        before, deadline = worker.bytes_printed, time.monotonic() + STACK_S
        while time.monotonic() < deadline:
            printed = worker.bytes_printed
            with suppress(TimeoutError):
                reply = await worker.channel.wait_for_reply(LATE_S)
                return reply
            if before < worker.bytes_printed == printed:
                break  # the output has ended
        return None

    def _check_open(self) -> None:
        if not self._open:
            raise RewardWorkerLost("the reward pool is not running")

    async def _ensure_worker(self, slot: int) -> Child:
        """Return the worker of a slot, starting one if needed; raise ChildLost, ConfigError."""
        worker = self._workers[slot]
        if worker is not None and not worker.channel.ended.done():
            return worker
        await self._drop_worker(slot)
        spawned = spawn_child(
            "laminar.tasks.rewards.worker",
            guarded=True,
            stderr=subprocess.PIPE,
            environment=self._env,
        )
        worker = self._workers[slot] = Child(spawned, CallScored, on_output=self._on_output)
        await worker.await_ready(self._start_timeout_s, self._spec, "its scorer did not load")
        return worker

    async def _drop_worker(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            await worker.kill_tree()
