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
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from laminar.core.steps.batching import STRATEGIES
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId
from laminar.run.child_channel import ChildLost, Ready, Refused
from laminar.run.child_process import Child, connect_user_code, print_output, spawn_child
from laminar.run.user_code import load_user_function

ANSWER_BYTES_MAX = 16 << 20
"""The maximum answer of a strategy, group ids only."""
START_S = 120.0
DETAIL_CHARS_MAX = 500


class StrategyAnswer(msgspec.Struct, tag="answer"):
    groups: list[str]


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
        self._process: Child | None = None
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
            await process.kill_tree()

    async def _ask_strategy(self, command: cmd.ProposeBatch) -> None:
        detail, groups = "", tuple[GroupId, ...]()
        try:
            groups = await self._exchange_messages(command)
        except ValueError as error:  # the file's or function's own, or an invalid answer
            detail = f"{type(error).__name__}: {error}"
        except ChildLost as error:
            detail = f"the strategy's process ended: {error}"
            await self._end_process()
        detail = detail[:DETAIL_CHARS_MAX]
        self._report(ev.BatchProposed(step_index=command.step_index, groups=groups, detail=detail))

    async def _exchange_messages(self, command: cmd.ProposeBatch) -> tuple[GroupId, ...]:
        if self._process is None or self._process.returncode is not None:
            self._process = Child(
                spawn_child(
                    "laminar.coordinator.strategy",
                    self._reference,
                    guarded=True,
                    stderr=subprocess.PIPE,
                ),
                StrategyAnswer,
                on_output=print_output,
                bytes_max=ANSWER_BYTES_MAX,
            )
            await self._process.await_ready(START_S)
        answer = await self._process.channel.request_reply(command, None)
        if isinstance(answer, Refused):
            raise ValueError(answer.reason)
        return _check_offered(answer.groups, command)


def _check_offered(groups: list[str], command: cmd.ProposeBatch) -> tuple[GroupId, ...]:
    """Return the answer for the event log; raise ValueError for groups that were not on offer."""
    offered = {str(candidate.group) for candidate in command.candidates}
    strange = [group for group in groups if group not in offered]
    if strange or len(groups) > len(offered):
        raise ValueError(f"{len(groups)} groups were returned, {len(strange)} of them not offered")
    return tuple(map(GroupId, groups))


def main(fd: str, parent: str, reference: str) -> None:
    """Serve as the child, whose user code may print."""
    channel = connect_user_code(fd, parent)
    with channel.refuse_errors():
        function = load_strategy(reference)

    def propose(command: cmd.ProposeBatch) -> StrategyAnswer | Refused:
        try:
            groups = function(msgspec.to_builtins(command.candidates), command.count)
            return StrategyAnswer([str(group) for group in groups])
        except Exception as error:
            return Refused(f"{type(error).__name__}: {error}")

    channel.send(Ready())
    channel.serve_requests(cmd.ProposeBatch, propose)


if __name__ == "__main__":
    main(*sys.argv[1:])
