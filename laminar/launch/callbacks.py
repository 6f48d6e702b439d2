"""Callbacks of a program that has started a run, in the form of transformers' TrainerCallback.

Reads   the lines of metrics.jsonl as they are written
Gives   CallbackCaller, whose `follow` is called in a thread until the run has ended
Raises  whatever a callback raises, which ends the run so that it can be resumed

A callback has any of on_train_begin, on_step_end, on_log, on_evaluate and on_train_end, which take
(args, state, control, **kwargs). `control.should_training_stop = True` ends the run gracefully.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from laminar.config import Config
from laminar.run.directory import METRICS_FILE

EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")
EVALUATION = "val/version"  #: in each line of metrics.jsonl about an evaluation


class CallbackCaller:
    """Caller of the callbacks, in their order, for each new line of the run's metrics."""

    def __init__(self, callbacks: Sequence[Any], config: Config, run_dir: Path) -> None:
        self._callbacks = [each() if isinstance(each, type) else each for each in callbacks]
        self._args, self._path, self._read = config, run_dir / METRICS_FILE, 0
        self.control = SimpleNamespace(should_training_stop=False)
        steps = config.trainer.total_training_steps
        self._state = SimpleNamespace(global_step=0, max_steps=steps, log_history=[])

    def call(self, event: str, **details: Any) -> None:
        """Call the method of this name of each callback that has it."""
        for callback in self._callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(self._args, self._state, self.control, **details)

    def follow(self) -> None:
        """Call what the new lines call for."""
        for line in self._read_lines():
            figures: dict[str, Any] = json.loads(line)
            if not self._state.log_history:
                self.call("on_train_begin")
            self._state.global_step = figures["step"]
            self._state.log_history.append(figures)
            if EVALUATION in figures:
                self.call("on_evaluate", metrics=figures)
            else:
                self.call("on_step_end")
            self.call("on_log", logs=figures)

    def _read_lines(self) -> Iterator[bytes]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield line
