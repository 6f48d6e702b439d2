"""A run that a Python program starts: its objects as settings, its threads, its outcome.

Reads   the arguments of laminar.train; status.json and metrics.jsonl of the run
Writes  a temporary folder with functions and rows, until the run has copied them
Starts  the stages of `laminar train` in a thread, and a thread that calls the callbacks
Gives   start_run, RunThreads
Raises  ConfigError for an argument; RunThreads.join: the outcome of the run

The launching program, such as a notebook, stays usable. Callbacks have the form of transformers'
TrainerCallback; one that raises pauses the run, which can be resumed.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from laminar.config import Config, ConfigError
from laminar.coordinator.restarts import GiveUp
from laminar.launch.panel import StepPace, format_progress
from laminar.launch.sizing import load_sized_config
from laminar.launch.supervisor import POLL_S, StopRequest
from laminar.launch.terminal import Terminal
from laminar.launch.train import StartFiles, place_of, run_training
from laminar.run.directory import METRICS_FILE, read_status
from laminar.run.user_code import ObjectFolder, take_objects

FUNCTIONS = {
    "agent": "agents.run",
    "loss": "algorithm.policy_loss.loss_mode",
    "advantage": "algorithm.adv_estimator",
}
EVALUATION = "val/version"  #: in each line of metrics.jsonl about an evaluation


def start_run(
    sources: Sequence[str | Path | Mapping[str, Any]],
    *,
    callbacks: Sequence[Any] | None = None,
    move_old: bool = False,
    quiet: bool = False,
    **objects: Any,
) -> RunThreads:
    """Start a run with the arguments of laminar.train, `objects` among them."""
    folder = ObjectFolder()
    try:
        config = load_sized_config([*sources, name_objects(folder, **objects)])
        place_of(config, move_old)
        return RunThreads(config, folder, callbacks or (), move_old=move_old, quiet=quiet)
    except BaseException:
        folder.close()
        raise


def name_objects(
    folder: ObjectFolder,
    *,
    reward_funcs: Any = None,
    reward_weights: Sequence[float] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    environment_factory: Any = None,
    agent: Any = None,
    loss: Any = None,
    advantage: Any = None,
) -> dict[str, Any]:
    """Return the settings that name the objects, which are in the folder, or are importable."""
    found: dict[str, Any] = {}
    listed = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if reward_weights is not None and (reward_funcs is None or len(reward_weights) != len(listed)):
        raise ConfigError(f"reward_weights = {reward_weights!r} needs a number per reward function")
    if reward_funcs is not None:
        named = [folder.name_object("reward_funcs", function) for function in listed]
        weighted = zip(named, reward_weights or [1.0] * len(listed), strict=True)
        found = {"reward.kind": "auto", "reward.custom_reward_function.path": ""}
        found["reward.functions"] = [
            {"path": path, "name": name, "weight": weight} for (path, name), weight in weighted
        ]
    if train_dataset is not None:
        files = folder.write_rows("train_dataset", train_dataset)
        found |= {"data.dataset": "", "data.dataset_config": {}, "data.train_files": files}
    if eval_dataset is not None:
        found["data.val_files"] = folder.write_rows("eval_dataset", eval_dataset)
    if environment_factory is not None:
        path, name = folder.name_object("environment_factory", environment_factory)
        found |= {"env.path": path, "env.name": name}
    for argument, value in {"agent": agent, "loss": loss, "advantage": advantage}.items():
        if value is not None:
            found[FUNCTIONS[argument]] = ":".join(folder.name_object(argument, value)).lstrip(":")
    return found


class RunThreads:
    """Thread that starts a run and watches it until its end, and one that follows its progress."""

    def __init__(
        self, config: Config, folder: ObjectFolder, callbacks: Sequence[Any], **options: bool
    ) -> None:
        self._config, self._folder, self.run_dir = config, folder, config.run_dir
        self._callbacks = [each() if isinstance(each, type) else each for each in callbacks]
        self._asked, self._pace = StopRequest(), StepPace()
        self._asked.begun_ns = time.time_ns()
        self._begun, self._read = False, 0  #: whether the directory is this run's; bytes of metrics
        self._over: GiveUp | None = None
        self._errors: list[BaseException] = []
        self._control = SimpleNamespace(should_training_stop=False)
        steps = config.trainer.total_training_steps
        self._state = SimpleNamespace(global_step=0, max_steps=steps, log_history=[])
        self.progress = "starting"  #: line with the step, the reward and the time left
        self._thread = threading.Thread(target=self._run, kwargs=options)
        self._follower = threading.Thread(target=self._follow)
        self._thread.start()
        self._follower.start()

    def stop(self) -> None:
        """Request a graceful end: the step in training is completed, the model exported."""
        self._asked.raise_level(StopRequest.DRAIN, "stop()")

    def join(self) -> GiveUp:
        """Wait for the end; in the main thread signals stop the run, as for `laminar train`."""
        with self._asked:
            while self._follower.is_alive():
                self._follower.join(POLL_S)
        for error in self._errors:
            raise error
        assert self._over is not None
        return self._over

    def _run(self, move_old: bool, quiet: bool) -> None:
        ways = argparse.Namespace(dry_run=False, prepare=False, resume=None, move_old=move_old)
        files = StartFiles("the program's objects", [], self._take_objects)
        console = Terminal(quiet=quiet)
        try:
            self._over = run_training(self._config, self.run_dir, ways, files, console, self._asked)
        except ConfigError as error:
            self._errors.append(ConfigError(str(error).replace(f"{self._folder.path}/", "")))
        except BaseException as error:  # raised by join
            self._errors.append(error)
        finally:
            self._folder.close()

    def _take_objects(self, run_dir: Path) -> None:
        take_objects(self._folder.path, run_dir)
        self._begun = True

    def _follow(self) -> None:
        """Keep `progress` and call the callbacks; an error of one pauses the run."""
        try:
            is_alive = True
            while is_alive:
                self._thread.join(POLL_S)
                is_alive = self._thread.is_alive()
                if self._begun and (status := read_status(self.run_dir)):
                    self.progress = format_progress(status, self._pace, time.monotonic())
                    self._call_for_lines()
            if self._over is not None:
                self._call("on_train_end")
        except Exception as error:
            self._errors.append(error)
            level = StopRequest.PAUSE if self._config.trainer.save_freq else StopRequest.DRAIN
            self._asked.raise_level(level, f"a callback raised {error!r}")
            self._thread.join()

    def _call_for_lines(self) -> None:
        """Call the callbacks for each new line of the metrics."""
        for figures in self._read_lines():
            if not self._state.log_history:
                self._call("on_train_begin")
            self._state.global_step = figures["step"]
            self._state.log_history.append(figures)
            is_step = EVALUATION not in figures
            self._call("on_step_end") if is_step else self._call("on_evaluate", metrics=figures)
            self._call("on_log", logs=figures)

    def _call(self, event: str, **details: Any) -> None:
        for callback in self._callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(self._config, self._state, self._control, **details)
        if self._control.should_training_stop:
            self.stop()

    def _read_lines(self) -> Iterator[dict[str, Any]]:
        with suppress(FileNotFoundError), (self.run_dir / METRICS_FILE).open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    yield json.loads(line)
