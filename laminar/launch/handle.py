"""A run that a Python program starts: its objects as settings, its thread, its outcome.

Reads   the arguments of laminar.train; status.json of the run
Writes  a temporary folder with functions and rows, until the run has copied them
Starts  a thread, in which the stages of `laminar train` watch over the run
Gives   start_run, RunThread
Raises  ConfigError for an argument; RunThread.join: the outcome of the run

The launching program, such as a notebook, stays usable.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.config import Config, ConfigError
from laminar.coordinator.restarts import GiveUp
from laminar.launch.callbacks import CallbackCaller
from laminar.launch.panel import StepPace, format_progress
from laminar.launch.sizing import load_sized_config
from laminar.launch.supervisor import POLL_S, StopRequest
from laminar.launch.terminal import Terminal
from laminar.launch.train import StartFiles, place_of, run_training
from laminar.run.directory import read_status
from laminar.run.objects import ObjectFolder, take_objects

STOPPED = "stop()"  #: reason of a stop that the program requested

FUNCTIONS = {"loss": "algorithm.policy_loss.loss_mode", "advantage": "algorithm.adv_estimator"}
"""Arguments that are a function or a built-in name, with their keys."""


def start_run(
    sources: Sequence[str | Path | Mapping[str, Any]],
    *,
    callbacks: Sequence[Any] | None = None,
    move_old: bool = False,
    quiet: bool = False,
    **objects: Any,
) -> RunThread:
    """Start a run with the arguments of laminar.train, `objects` among them."""
    folder = ObjectFolder()
    try:
        config = load_sized_config([*sources, name_objects(folder, **objects)])
        run_dir = place_of(config, move_old)
        listed = list(callbacks or ())
        return RunThread(config, run_dir, folder, listed, move_old=move_old, quiet=quiet)
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
    **functions: Any,
) -> dict[str, Any]:
    """Return the settings that name the objects, which are in the folder, or are importable."""
    found: dict[str, Any] = {}
    if reward_funcs is not None:
        found |= {"reward.kind": "auto", "reward.custom_reward_function.path": ""}
        found["reward.functions"] = _list_rewards(folder, reward_funcs, reward_weights)
    elif reward_weights is not None:
        raise ConfigError(f"reward_weights = {reward_weights!r} has no reward_funcs: give both")
    if train_dataset is not None:
        found |= {"data.dataset": "", "data.dataset_config": {}}
        found["data.train_files"] = folder.write_rows("train_dataset", train_dataset)
    if eval_dataset is not None:
        found["data.val_files"] = folder.write_rows("eval_dataset", eval_dataset)
    if environment_factory is not None:
        named = folder.name_object("environment_factory", environment_factory)
        found["env.path"], found["env.name"] = named
    for argument, value in functions.items():
        if value is not None:
            built_in = isinstance(value, str) and ":" not in value
            named = folder.name_object(argument, value) if not built_in else value
            found[FUNCTIONS[argument]] = named if built_in else ":".join(named)
    return found


def _list_rewards(
    folder: ObjectFolder, functions: Any, weights: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Return the entries of reward.functions."""
    listed = list(functions) if isinstance(functions, list | tuple) else [functions]
    weights = [1.0] * len(listed) if weights is None else list(weights)
    if len(weights) != len(listed):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for the {len(listed)} functions of "
            "reward_funcs; give one for each"
        )
    found = []
    for value, weight in zip(listed, weights, strict=True):
        built_in = isinstance(value, str) and ":" not in value
        path, name = ("", value) if built_in else folder.name_object("reward_funcs", value)
        found.append({"path": path, "name": name, "weight": weight})
    return found


class RunThread:
    """Thread that starts a run and watches it until its end, and one that follows its progress."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        folder: ObjectFolder,
        callbacks: Sequence[Any],
        *,
        move_old: bool,
        quiet: bool,
    ) -> None:
        self._config, self.run_dir, self._folder = config, run_dir, folder
        self._move_old, self._console = move_old, Terminal(quiet=quiet)
        self._asked, self._pace = StopRequest(), StepPace()
        self._caller = CallbackCaller(callbacks, config, run_dir)
        self._over: GiveUp | None = None
        self._errors: list[BaseException] = []
        self.progress = "starting"  #: line with the step, the reward and the time left
        self._thread = threading.Thread(target=self._run, name=f"laminar {run_dir.name}")
        self._follower = threading.Thread(target=self._follow, name=f"callbacks {run_dir.name}")
        self._thread.start()
        self._follower.start()

    def stop(self) -> None:
        """Request a graceful end."""
        self._asked.raise_level(StopRequest.DRAIN, STOPPED)

    def join(self) -> GiveUp:
        """Wait for the end; in the main thread signals stop the run, as for `laminar train`."""
        with self._asked:
            while self._follower.is_alive():
                self._follower.join(POLL_S)
        for error in self._errors:
            raise error
        assert self._over is not None
        return self._over

    def _run(self) -> None:
        ways = argparse.Namespace(
            dry_run=False, prepare=False, resume=None, move_old=self._move_old
        )
        try:
            self._over = run_training(
                self._config,
                self.run_dir,
                ways,
                StartFiles("the objects", [], lambda to: take_objects(self._folder.path, to)),
                console=self._console,
                asked=self._asked,
            )
        except ConfigError as error:
            self._errors.append(ConfigError(self._folder.describe(str(error))))
        except BaseException as error:  # raised by join
            self._errors.append(error)
        finally:
            self._folder.close()

    def _follow(self) -> None:
        """Keep `progress` and call the callbacks; an error of one pauses the run, resumable."""
        try:
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                self._caller.follow()
                if self._caller.control.should_training_stop:
                    self.stop()
                if status := read_status(self.run_dir):
                    self.progress = format_progress(status, self._pace, time.monotonic())
            if self._over is not None:
                self._caller.call("on_train_end")
        except Exception as error:
            self._errors.append(error)
            self._asked.raise_level(StopRequest.PAUSE, f"a callback raised {error!r}")
            self._thread.join()
