"""Four or more torch.distributed processes, started once, of which a test uses as many as it needs.

Gives   RankGroup: its processes run functions of tools/kit/rank_cases.py
"""

from __future__ import annotations

import multiprocessing
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from laminar.training.ranks import RankLayout

SIZE = 4
ANSWER_S = 90.0  #: longer than the ranks wait for each other


class RankGroup:
    """A group of processes forked from one that has imported torch, so imports happen once."""

    def __init__(self, timeout_s: float = 30.0, size: int = SIZE) -> None:
        """Start `size` processes; `timeout_s` limits how long the ranks wait for each other."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tools.kit.rank_cases"])
        self._stack = ExitStack()
        store = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "meeting"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, store, timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, size: int | RankLayout, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the results of `function(ranks, ...)` on each of the first `size` ranks.

        `size`: of a single node, or a layout over several."""
        layout = size if isinstance(size, RankLayout) else RankLayout(1, size, "node")
        size = layout.size
        for pipe in self._pipes[:size]:
            pipe.send((layout, function, args, kwargs))
        answers: list[Any] = []
        failed, silent = [], []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(0.0 if silent else ANSWER_S):
                silent.append(rank)
                continue
            ok, answer = pipe.recv()
            answers.append(answer)
            if not ok:
                failed.append(f"rank {rank} of {size}:\n{answer}")
        failed += [f"rank {rank} of {size} without answer" for rank in silent]
        assert not failed, "\n".join(failed)
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._stack.close()


def _serve(rank: int, size: int, store: Path, timeout_s: float, pipe: Connection) -> None:
    from tools.kit import rank_cases

    rank_cases.serve(rank, size, store, timeout_s, pipe)
