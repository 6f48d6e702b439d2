"""Python objects given to laminar.train: functions of every form, rows, environments, callbacks."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import types
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import laminar
from laminar.config import ConfigError, load_config
from laminar.launch.handle import name_objects
from laminar.run.user_code import ObjectFolder, import_file
from tests.test_python import EMULATED

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "configs" / "models"
WORDS = ("apple", "banana", "cherry", "grape", "lemon", "melon", "orange", "peach")
ROWS = [{"prompt": f"Spell {word}"} for word in WORDS]
SMALL: dict[str, Any] = {
    "model.name": str(MODELS / "spell-0.6m"),
    "data": {"max_response_length": 8, "val_size": 1, "train_batch_size": 2},
    "rollout": {"replicas": 1, "group_size": 2},
    "trainer": {"save_freq": 1, "logger": []},
    "trainer.total_training_steps": 2,
}
LIMIT = {"trainer.total_training_steps": 500}


@pytest.fixture
def folder() -> Iterator[ObjectFolder]:
    made = ObjectFolder()
    yield made
    made.close()


def reward_func(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def math_reward_func(prompts, completions, task, **kwargs):
    assert all(isinstance(prompt, str) for prompt in prompts)
    return [2.0 if each == "math" else None for each in task]


def coding_reward_func(prompts, completions, task, **kwargs):
    return [-1.0 if each == "code" else None for each in task]


async def async_reward_func(prompts, completions, trainer_state, **kwargs):
    await asyncio.sleep(0.01)
    return [10.0 + min(trainer_state.global_step, 0) for _ in completions]


class IncrementEnv:
    def reset(self, **kwargs):
        self.counter = 0

    def increment(self, step: int) -> int:
        """Increase the counter.

        Args:
            step: The number to add.
        """
        self.counter += step
        return self.counter


def counter_reward(environments, **kwargs):
    return [7.0 + 0 * each.counter for each in environments]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_examples_of_trl_train_unchanged(tmp_path: Path) -> None:
    """Importable functions are named by their file."""
    place = {"run": {"output_dir": tmp_path, "name": "one"}}
    one = laminar.train([SMALL, place], reward_funcs=reward_func, train_dataset=ROWS, quiet=True)
    assert set(one.samples(step=1)["reward"].to_pylist()) <= {float(n) for n in range(1, 9)}
    assert one.config["reward"]["functions"][0]["path"] == __file__

    tasks = [row | {"task": ("math", "code")[i % 2]} for i, row in enumerate(ROWS)]
    several = laminar.start(
        [SMALL, place, {"run.name": "several"}],
        reward_funcs=[math_reward_func, coding_reward_func, async_reward_func],
        reward_weights=[1.0, 2.0, 0.5],
        train_dataset=pa.Table.from_pylist(tasks),
        eval_dataset=tasks[:2],
        quiet=True,
    ).wait()
    assert {*several.samples(step=1)["reward"].to_pylist()} <= {2.0 + 5.0, -2.0 + 5.0}
    assert several.samples(evaluation=2).num_rows == 2

    chats = [{"prompt": [{"role": "user", "content": f"Add {i}"}]} for i in range(8)]
    calculator = {"run.name": "environment", "model.name": MODELS / "calculator-0.6m"}
    calculator |= {"env.max_context_tokens": 64, "data.max_response_length": 64}
    environment = laminar.train(
        [SMALL, place, calculator],
        environment_factory=lambda: IncrementEnv(),
        reward_funcs=counter_reward,
        train_dataset=chats,
        quiet=True,
    )
    assert {*environment.samples(step=2)["reward"].to_pylist()} == {7.0}
    assert '"increment"' in environment.config["env"]["tools"]


def test_an_agent_of_the_program_is_trained(tmp_path: Path) -> None:
    scores = {"Spell apple": 0.25}

    def ask_once(task: dict[str, Any], endpoint: Any) -> float:
        messages = [{"role": "user", "content": task["prompt"]}]
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions",
            json.dumps({"model": endpoint.model, "messages": messages}).encode(),
            {"Authorization": f"Bearer {endpoint.api_key}"},
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["choices"][0]["message"]["role"] == "assistant"
        return scores.get(task["prompt"], 0.5)

    model = {"model.name": MODELS / "calculator-0.6m", "env.max_context_tokens": 64}
    model["run.output_dir"] = tmp_path
    run = laminar.train([SMALL, model], agent=ask_once, train_dataset=ROWS, quiet=True)
    assert {*run.samples()["reward"].to_pylist()} <= {0.25, 0.5}
    assert run.config["agents"]["run"].endswith("objects/ask_once.pkl:ask_once")


HELPER = """
class Judge:
    def __init__(self, share):
        self.share = share
    def __call__(self, completions, **kwargs):
        return [self.share for _ in completions]
"""
PROGRAM = """
import functools, os, helper, laminar
os.umask(0o002)
CONSTANT, BIG, SCALE = {"a": 1.0}, helper.Judge(16.0), 0.5
class Judge(helper.Judge):
    def judge(self, completions, **kwargs):
        return [2 * share for share in self(completions)]
def close_over(table):
    def closure(completions, **kwargs):
        return [table["b"] for _ in completions]
    return closure
def scaled(completions, factor, **kwargs):
    return [factor for _ in completions]
def my_loss(batch):
    return -SCALE * batch.advantages * batch.log_ratio.exp()
class Interrupter:
    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError(f"enough after {state.global_step}")
if __name__ == "__main__":
    functions = [
        lambda completions, **kwargs: [CONSTANT["a"]] * len(completions), close_over({"b": 2.0}),
        Judge(2.0).judge, functools.partial(scaled, factor=8.0), BIG,
    ]
    try:
        laminar.train(SETTINGS, reward_funcs=functions, train_dataset=ROWS, callbacks=[Interrupter],
            loss=my_loss, advantage=lambda batch: batch.rewards - batch.group_means(batch.rewards))
    except RuntimeError as error:
        print("raised", error)
"""


def run_command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)
def test_functions_of_every_form_survive_a_resume_and_a_fork_elsewhere(tmp_path: Path) -> None:
    """A callback that raises pauses the run. The functions are in it, but not their modules."""
    settings = SMALL | LIMIT | {"run.output_dir": str(tmp_path / "runs"), "run.name": "forms"}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text(HELPER)
    program = tmp_path / "own" / "program.py"
    program.write_text(f"ROWS = {ROWS!r}\nSETTINGS = {settings!r}\n{PROGRAM}")
    first = run_command(program)
    assert first.stdout.endswith("raised enough after 1\n"), first.stdout + first.stderr
    moved = (tmp_path / "runs" / "forms").rename(tmp_path / "moved")
    assert len(list((moved / "objects").glob("*.pkl"))) == 7
    program.unlink()
    done = laminar.open_run(moved).summary["steps"]
    resume = ("-m", "laminar.cli.main", "train", "--resume", moved, "--max-steps", str(done + 2))
    (tmp_path / "own" / "helper.py").rename(tmp_path / "helper")
    before = (moved / "config.toml").read_text()
    refused = run_command(*resume)
    sentence = r"laminar: \S+/objects/judge.pkl does not import: ModuleNotFoundError: No module "
    sentence += r"named 'helper'.*; it was stored when the run began: restore the modules .*\n"
    assert refused.returncode == 2 and re.fullmatch(sentence, refused.stderr), refused.stderr
    assert (moved / "config.toml").read_text() == before
    (tmp_path / "helper").rename(tmp_path / "own" / "helper.py")
    resumed = run_command(*resume)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    fork = ("-m", "laminar.cli.main", "fork", moved, "--at-step", str(done + 2), "--max-steps")
    forked = run_command(*fork, str(done + 3))
    assert forked.returncode == 0, forked.stdout + forked.stderr
    for run_dir, step in ((moved, done + 2), (tmp_path / f"moved-step-{done + 2}", done + 3)):
        assert str(run_dir / "objects") in str(laminar.open_run(run_dir).config)
        assert {*laminar.open_run(run_dir).samples(step=step)["reward"].to_pylist()} == {31.0}


def test_code_is_named_by_file_or_module(
    folder: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a package is imported as its module, so relative imports work."""
    package = tmp_path / "mine" / "inner"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").write_text("")
    (package / "sibling.py").write_text("SHARE = 2.0\n")
    text = "from .sibling import SHARE\n\ndef score(completions):\n    return [SHARE]\n"
    (package / "rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    named = name_objects(folder, reward_funcs="mine.inner.rewards:score", loss="mine.inner:f")
    config = load_config([{"model.name": "m", "data.train_files": ["x.jsonl"]}, named])
    (entry,) = config.reward.functions
    assert (entry.path, entry.name) == (str(package / "rewards.py"), "score")
    assert config.algorithm.policy_loss.loss_mode == f"{package / '__init__.py'}:f"
    score = import_file(Path(entry.path)).score
    assert score([""]) == [2.0] and score.__module__ == "mine.inner.rewards"
    assert folder.name_object("reward_funcs", score) == (entry.path, "score")


def score_once(completions, **kwargs):
    return [1.0]


def score_in_pairs(completions, **kwargs):
    import torch

    return torch.zeros(len(completions), 2)


def close_over(captured):
    return lambda completions: [float(bool(captured)) for _ in completions]


TWO_TYPES = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": "x"}]
HOLDER = types.SimpleNamespace(file=sys.__stdin__)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"train_dataset": iter(ROWS)}, "a list_iterator without a number of rows"),
        ({"train_dataset": [*ROWS, "x"]}, "train_dataset has the row 'x'"),
        ({"train_dataset": [*ROWS, None]}, "train_dataset has the row None"),
        ({"train_dataset": TWO_TYPES}, "the column 'n', whose values have no common type"),
        ({"reward_funcs": 3}, "reward_funcs has 3: give a function"),
        ({"reward_funcs": [len], "reward_weights": [1, 2]}, "reward_weights = [1, 2] needs"),
        ({"reward_weights": [1]}, "reward_weights = [1] needs a number per reward function"),
        ({"reward_funcs": close_over(threading.Lock())}, "holds 'captured', a lock"),
        ({"reward_funcs": partial(close_over(1), HOLDER)}, "holds 'file', a TextIOWrapper"),
    ],
)
def test_an_argument_that_cannot_work_has_its_sentence(
    tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    place = {"run.output_dir": tmp_path / "runs"}
    with pytest.raises(ConfigError, match=re.escape(sentence)) as raised:
        laminar.start([SMALL, place], **arguments)
    assert "\n" not in str(raised.value) and not (tmp_path / "runs").exists()


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("function", "rows", "sentence"),
    [
        (score_once, [{"a": "b"}], "^train_dataset.parquet row 0 has no column 'prompt' .it has a"),
        (score_once, ROWS, "returned a list of 1 for 2 completions, not a list of 2 scores"),
        (score_in_pairs, ROWS, "returned a Tensor for 2 completions, not a list of 2 scores"),
    ],
)
def test_a_run_that_cannot_work_is_not_begun(
    tmp_path: Path, function: Any, rows: Any, sentence: str
) -> None:
    place = {"run.output_dir": tmp_path / "runs"}
    with pytest.raises(ConfigError, match=sentence):
        laminar.train([SMALL, place], reward_funcs=function, train_dataset=rows, quiet=True)
    assert not (tmp_path / "runs").exists()


class Frame:
    """Stand-in for a datasets.Dataset, or with `iloc` for a pandas frame."""

    def to_parquet(self, path, **options):
        assert options == ({"index": False} if hasattr(self, "iloc") else {})
        pq.write_table(pa.Table.from_pylist(ROWS), path)


def test_rows_become_one_parquet_file(folder: ObjectFolder) -> None:
    frame = Frame()
    frame.iloc = None
    for rows in (ROWS, tuple(ROWS), pa.Table.from_pylist(ROWS), Frame(), frame):
        (path,) = folder.write_rows("train_dataset", rows)
        assert Path(path).name == "train_dataset.parquet"
        assert pq.read_table(path).to_pylist() == ROWS
    (path,) = folder.write_rows("eval_dataset", [{"a": [1]}, {"b": "x"}])
    assert pq.read_table(path).to_pylist() == [{"a": [1], "b": None}, {"a": None, "b": "x"}]
    for paths in ("a.jsonl", [Path("a.jsonl")]):
        assert folder.write_rows("train_dataset", paths) == ["a.jsonl"]


class Recorder:
    def __init__(self):
        self.events, self.reached = [], threading.Event()

    def record(self, event, args, state, control, logs=None, metrics=None):
        self.events.append(f"{event} {state.global_step}")
        assert args.data.train_batch_size == 2 and state.max_steps == 500
        assert (logs or metrics or {"step": state.global_step})["step"] == state.global_step
        if event == "on_step_end":
            self.reached.set()

    def __getattr__(self, event):
        if not event.startswith("on_"):
            raise AttributeError(event)
        return lambda *given, **details: self.record(event, *given, **details)


@pytest.mark.process
def test_a_started_run_is_read_and_stopped_while_the_program_continues(tmp_path: Path) -> None:
    """The old run in the same place is moved aside: callbacks are not called for it."""
    place = {"run.output_dir": tmp_path} | LIMIT
    for recorder in (Recorder(), Recorder()):
        active = laminar.start([EMULATED, place], callbacks=[recorder], move_old=True, quiet=True)
        assert recorder.reached.wait(120) and active.metrics.num_rows >= 2
        active.stop()
        run = active.wait()
        assert run.summary["interrupted"] and run.summary["steps"] < 500
        assert re.match(r"step \d+/500  reward \d", active.progress)
        assert recorder.events[:2] == ["on_train_begin 0", "on_evaluate 0"]
        assert recorder.events[-1].startswith("on_train_end")
        logged = [event for event in recorder.events if event.startswith("on_log")]
        assert len(logged) == run.metrics.num_rows


@pytest.mark.process
def test_a_callback_stops_the_run(tmp_path: Path) -> None:
    def stop(args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2

    place, callback = {"run.output_dir": tmp_path} | LIMIT, types.SimpleNamespace(on_step_end=stop)
    run = laminar.train([EMULATED, place], callbacks=[callback], quiet=True)
    assert run.summary["interrupted"] and 2 <= run.summary["steps"] < 500


PRESS = """
import os, signal, time, laminar
class Press:
    def on_step_end(self, args, state, *_, **__):
        handler = signal.getsignal(signal.SIGINT)
        for _ in range(PRESSES * (state.global_step == 1)):
            level = handler.__self__.level
            os.kill(os.getpid(), signal.SIGINT)
            while handler.__self__.level == level:
                time.sleep(0.01)
try:
    run = laminar.train(SETTINGS, callbacks=[Press], quiet=True)
    print("returned", run.summary["interrupted"])
except KeyboardInterrupt:
    print("KeyboardInterrupt True")
"""


@pytest.mark.process
@pytest.mark.parametrize(("presses", "outcome"), [(1, "returned"), (2, "KeyboardInterrupt")])
def test_an_interrupted_wait_stops_the_run(tmp_path: Path, presses: int, outcome: str) -> None:
    place = {"run.output_dir": str(tmp_path), "trainer.total_training_steps": 5000}
    found = run_command("-c", f"PRESSES, SETTINGS = {presses}, {[EMULATED, place]!r}\n{PRESS}")
    assert found.stdout == f"{outcome} True\n", found.stdout + found.stderr
