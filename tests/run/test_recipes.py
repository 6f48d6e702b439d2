"""Recipes: copied by `laminar init`, trained three steps with a tiny model, and their plans fit.

Models and data of the hub are in a cache that a test makes. `words` is run elsewhere: quickstart.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from laminar.cli.commands import run_command
from laminar.cli.init import RECIPES
from laminar.config import Config, ConfigError, load_config, replace_keys
from laminar.launch.memory_check import MachineMemory, MemoryEstimate, MemoryPlace
from laminar.names import exit_codes
from laminar.tasks.data.prompts import load_prompts
from laminar.tasks.rewards.builtin_scorers import math_scorer
from laminar.tasks.rewards.results import FunctionSpec
from laminar.tasks.sandbox.sandbox import NoSandbox, Sandbox
from laminar.training.model import footprint
from tests.run.conftest import ROOT, check_books, train
from tests.run.test_families import build

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
MODELS: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 896, 4864, 24, 14, 2, 64, True),
    "Qwen/Qwen3-1.7B": (Qwen3Config, 2048, 6144, 28, 16, 8, 128, True),
    "Qwen/Qwen3-8B": (Qwen3Config, 4096, 12_288, 36, 32, 8, 128, False),
    "Qwen/Qwen3-32B": (Qwen3Config, 5120, 25_600, 64, 64, 8, 128, False),
}
#: GPUs, GB of each, GB of host memory (half of which can be shared) as in the README
HARDWARE = {
    "words": (0, 0, 4), "calculator": (0, 0, 4), "gsm8k-0.5b": (1, 24, 32),
    "code-1.7b": (1, 80, 96), "math-8b": (8, 80, 500), "math-8b-lora": (2, 80, 250),
    "math-32b": (8, 80, 1500),
}  # fmt: skip
SECTIONS = ["Task", "Data", "Run", "Hardware and plan", "Measured"]
DATA_SETS: dict[str, tuple[str, list[str], Callable[[int], dict[str, Any]]]] = {
    "openai/gsm8k": (
        "main", ["train", "test"],
        lambda i: {"question": f"{i} + 2 = ?", "answer": f"Add them.\n#### {i + 2}"},
    ),
    "DigitalLearningGmbH/MATH-lighteval": (
        "data", ["train", "test"],
        lambda i: {"problem": f"What is ${i}^2$?", "level": "Level 1", "type": "Algebra",
                   "solution": f"It is ${i} \\cdot {i} = \\boxed{{{i * i}}}$."},
    ),
    "google-research-datasets/mbpp": (
        "full", ["train", "validation", "test"],
        lambda i: {"task_id": i, "text": f"Write a function that adds {i}.",
                   "code": f"def f(x):\r\n  return x + {i}", "test_setup_code": "",
                   "test_list": [f"assert f({n}) == {n + i}" for n in range(3)],
                   "challenge_test_list": []},
    ),
}  # fmt: skip
SMALL = (
    "rollout.engine=torch", "rollout.replicas=1", "rollout.group_size=2", "rollout.device=cpu",
    "rollout.max_num_seqs=8", "trainer.device=cpu", "trainer.ranks=1",
    "trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=2",
    "data.dataset_size=200", "data.val_size=8", "data.max_prompt_length=400",
    "data.max_response_length=24", "data.train_batch_size=2", "algorithm.ppo_mini_batch_size=1",
)  # fmt: skip


def copy_recipe(name: str, directory: Path) -> Path:
    assert run_command(["init", str(directory / "my"), "--recipe", name]) == exit_codes.COMPLETE
    return directory / "my"


def snapshot(home: Path, kind: str, repository: str) -> Path:
    """A directory for files in the hub's cache below `home`."""
    place = home / "hub" / f"{kind}s--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("c0ffee")
    (place / "snapshots/c0ffee").mkdir(parents=True)
    return place / "snapshots/c0ffee"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with ten rows of each split, for processes without a network."""
    home = tmp_path / "hub-home"
    for repository, (folder, splits, make_row) in DATA_SETS.items():
        files = snapshot(home, "dataset", repository) / folder
        files.mkdir()
        for first, split in enumerate(splits):
            rows = pa.Table.from_pylist([make_row(10 * first + index) for index in range(10)])
            pq.write_table(rows, files / f"{split}-00000-of-00001.parquet")
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home


def prepare(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(directory / "prepare.py")]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(HARDWARE.keys() - {"words"}))
def test_three_steps_with_a_tiny_model(name: str, hub: Path, tmp_path: Path) -> None:
    directory = copy_recipe(name, tmp_path)
    model = tomllib.loads((directory / "run.toml").read_text())["model"]["name"]
    if model in MODELS:  # a tiny one of its family
        tiny = build("qwen3", hub) if "Qwen3" in model else ROOT / "configs/models/spell-0.6m"
        shutil.copytree(tiny, snapshot(hub, "model", model), dirs_exist_ok=True)
    if name == "code-1.7b":
        skip_without_sandbox()
    if (directory / "prepare.py").exists():
        assert prepare(directory).returncode == exit_codes.COMPLETE
    run = train(tmp_path, *SMALL, config=str(directory / "run.toml"))
    assert run.code == exit_codes.COMPLETE, run.output
    assert run.summary["steps"] == 3 and not run.summary["reward_errors"]
    check_books(run)


def skip_without_sandbox() -> None:
    try:
        Sandbox()
    except NoSandbox as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_a_recipe_is_complete_and_its_plan_fits(name: str, tmp_path: Path) -> None:
    """The README has its sections and the sizes of the plan, which fit; every key is known."""
    readme = (RECIPES[name] / "README.md").read_text()
    assert re.findall(r"^## (.+)", readme, re.MULTILINE)[:5] == SECTIONS
    config = load_recipe(name, tmp_path)
    for place in (places := list_places(config, name)):
        assert place.fits and (len(places) == 2 or f"{place.want / 1e9:.1f}" in readme), str(place)
    if name == "math-32b":
        on_gpus = list_places(replace_keys(config, {"trainer.offload": "none"}), name)
        assert [place.name[:3] for place in on_gpus if not place.fits] == ["GPU"] * 8


def load_recipe(name: str, directory: Path) -> Config:
    copied = copy_recipe(name, directory)
    for file in ("train.jsonl", "test.jsonl"):  # of prepare.py
        (copied / file).touch()
    return load_config([copied / "run.toml"])


def list_places(config: Config, recipe: str) -> list[MemoryPlace]:
    """The memories of the first machine, which has the trainer."""
    count, gpu, memory = HARDWARE[recipe]
    if found := MODELS.get(config.model.name):
        hf_config = found[0](vocab_size=151_936, **dict(zip(SIZES, found[1:], strict=True)))
    else:
        hf_config = Qwen2Config.from_pretrained(config.model.name)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(hf_config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sizes = footprint.sizes_of(hf_config.to_dict(), shapes)
    gpus = {str(index): gpu * 10**9 for index in range(count)}
    machine = MachineMemory(memory * 10**9, memory * 10**9 // 2, gpus)
    return MemoryEstimate(sizes, 1, machine).list_places(config)


def test_the_list_of_recipes_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(HARDWARE) == list(RECIPES)
    index = (ROOT / "docs/data_and_rewards.md").read_text()
    assert all(f"| `{name}` | " in index for name in HARDWARE)
    assert run_command(["init", str(tmp_path / "a"), "--recipe", "math"]) == exit_codes.USER_ERROR
    assert f"math is unknown; choose from {', '.join(RECIPES)}\n" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_prepared_rows_are_never_written_over(hub: Path, tmp_path: Path) -> None:
    """A config names its prepare.py until that has run; what a hub lacks is one sentence."""
    mine = copy_recipe("math-8b", tmp_path)
    with pytest.raises(ConfigError, match=r"train\.jsonl.*; make it with python .*my/prepare\.py$"):
        load_config([mine / "run.toml"])
    assert f"wrote {mine / 'test.jsonl'} (20 rows)\n" in prepare(mine).stdout
    rows = load_prompts(load_config([mine / "run.toml"]).data).train
    assert {row.data_source for row in rows} == {"gsm8k", "math"} and len(rows) == 20
    score = math_scorer(FunctionSpec("math"))
    for row in rows:
        answer = re.findall(r"\d+", row.ground_truth)[-1]
        assert (score(row, f"\\boxed{{{answer}}}"), score(row, "\\boxed{1000}")) == (1.0, 0.0)
    assert prepare(mine).stderr.startswith(f"prepare: {mine}/train.jsonl exists; remove it")
    shutil.rmtree(hub)
    for file in mine.glob("*.jsonl"):
        file.unlink()
    offline = prepare(mine)
    assert offline.returncode == exit_codes.USER_ERROR and "Traceback" not in offline.stderr
    assert "hf download openai/gsm8k --repo-type dataset" in offline.stderr
    assert not list(mine.glob("*.jsonl"))


@pytest.mark.process
def test_unit_tests_decide_over_code(hub: Path, tmp_path: Path) -> None:
    """The last block counts; too much time, too much memory and an early end give nothing."""
    skip_without_sandbox()
    mine = copy_recipe("code-1.7b", tmp_path)
    assert f"wrote {mine / 'train.jsonl'} (20 rows)\n" in prepare(mine).stdout
    row = load_prompts(load_config([mine / "run.toml"]).data).train[0]
    score = runpy.run_path(str(mine / "reward.py"))["compute_score"]

    def passed(text: str) -> tuple[float, float]:
        found = score(row.data_source, text, row.ground_truth, row.columns["extra_info"])
        return found["score"], found["tests_passed"]

    code = row.ground_truth
    assert passed(code) == (1.0, 1.0)
    assert passed(f"```\nf = 1\n```\nor\n```python\n{code}\n```") == (1.0, 1.0)
    assert passed(f"{code}\ng, f = f, lambda x: g(min(x, 1))") == (0.0, pytest.approx(2 / 3))
    for more in ("\nwhile True: pass", "\nimport os; os._exit(0)", " + 0 * len('a' * 10**10)"):
        assert passed(code + more) == (0.0, 0.0)
