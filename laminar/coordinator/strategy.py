"""A user's batch strategy, by path, in a separate process.

Reads   ProposeBatch commands; a file given as algorithm.batch_strategy = "path.py:function"
Emits   BatchProposed events; an empty answer when the function fails

The function gets the metadata of finished groups and the number wanted, and returns group ids. It
runs outside the coordinator because it may be slow or crash; its answer is logged, so a replay does
not run it again.

    def choose(candidates: list[dict], count: int) -> list[str]: ...
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from laminar.core.steps.batching import STRATEGIES
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId
from laminar.run.user_file import load_user_function

LINE_BYTES_MAX = 16 << 20
"""The maximum answer line of a strategy, group ids only; a user's print must not break the pipe."""
DETAIL_CHARS_MAX = 500


def load_strategy(reference: str) -> Callable[[list[dict[str, Any]], int], list[str]]:
    """Load the function named by "path.py:function"; raise ConfigError if it is unusable."""
    key = "algorithm.batch_strategy"
    function: Callable[[list[dict[str, Any]], int], list[str]]
    function = load_user_function(key, reference, STRATEGIES).function
    return function


class StrategyWorker:
    """A worker process for the strategy, started at the first question; one question at a time."""

    def __init__(self, reference: str, report: Callable[[ev.BatchProposed], None]) -> None:
        self._reference = "" if reference in STRATEGIES else reference
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def propose_batch(self, command: cmd.ProposeBatch) -> None:
        """Ask the strategy; the answer arrives as an event."""
        task = asyncio.get_running_loop().create_task(self._ask_strategy(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._end_process()

    async def _end_process(self) -> None:
        """End the process; the next question starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask_strategy(self, command: cmd.ProposeBatch) -> None:
        detail, groups = "", tuple[GroupId, ...]()
        try:
            groups = await self._exchange_lines(command)
        except ValueError as error:  # the function's own, or an invalid answer
            detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            detail = f"the strategy's process ended: {error}"
            await self._end_process()
        self._report(ev.BatchProposed(step_index=command.step_index, groups=groups, detail=detail))

    async def _exchange_lines(self, command: cmd.ProposeBatch) -> tuple[GroupId, ...]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "laminar.coordinator.strategy",
                self._reference,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES_MAX,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        question = {"candidates": msgspec.to_builtins(command.candidates), "count": command.count}
        stdin.write(json.dumps(question).encode() + b"\n")
        await stdin.drain()
        answer = json.loads(await stdout.readuntil(b"\n"))
        if "error" in answer:
            raise ValueError(answer["error"])
        return _check_offered(answer["groups"], command)


def _check_offered(groups: list[str], command: cmd.ProposeBatch) -> tuple[GroupId, ...]:
    """Return the answer for the event log; raise ValueError for groups that were not on offer."""
    offered = {str(candidate.group) for candidate in command.candidates}
    strange = [group for group in groups if group not in offered]
    if strange or len(groups) > len(offered):
        raise ValueError(f"{len(groups)} groups were returned, {len(strange)} of them not offered")
    return tuple(map(GroupId, groups))


def _serve_proposals(reference: str) -> None:
    """Serve as the child: one JSON line in, one JSON line out; the user's prints go to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    function = load_strategy(reference)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            groups = [str(g) for g in function(question["candidates"], question["count"])]
            answer: dict[str, Any] = {"groups": groups}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    _serve_proposals(sys.argv[1])
