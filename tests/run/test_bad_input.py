"""A user's mistake: one clear sentence on stderr, exit code 2, nothing started, nothing lost."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.names import exit_codes
from tests.run.conftest import ROOT

Cli = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """The sentence of a refused `laminar train`."""
    monkeypatch.chdir(ROOT)

    def train(*arguments: str) -> str:
        directory = f"run.output_dir={tmp_path / 'runs'}"
        small = ["data.dataset_size=300", "data.val_size=8"]
        code = run_command(
            ["train", "-c", "configs/recipes/words/run.toml", *arguments, directory, *small]
        )
        said = capsys.readouterr()
        assert code == exit_codes.USER_ERROR, said.out + said.err
        lines = said.err.strip().splitlines()
        assert len(lines) == 1, said.err
        assert not (tmp_path / "runs").exists()
        return lines[0]

    return train


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.name=/no/such/model"], ["/no/such/model", "model.name"]),
        (["rollout.grup_size=4"], ["rollout.grup_size", "rollout.group_size"]),
        (["optim.lr=fast"], ["optim.lr", "fast", "number"]),
        (["data.dataset=spel_backward"], ["spel_backward", "spell_backward"]),
        (["-c", "nowhere.toml"], ["nowhere.toml"]),
        (["data.max_response_length=4096"], ["2048", "positions"]),
        (["data.max_prompt_length=20"], ["20", "tokens", "data.max_prompt_length"]),
        (["algorithm.batch_strategy=nowhere.py:f"], ["nowhere.py:f", "deadline"]),
        (["repack.policy=best"], ["repack.policy = 'best'", "'best-fit', 'gain' or 'off'"]),
        (["repack.interval_ms=0"], ["repack.interval_ms = 0", "at least 1"]),
        (["repack.release_timeout_ms=-2000"], ["repack.release_timeout_ms = -2000", "at least 1"]),
        (["rollout.max_batch=0"], ["rollout.max_batch = 0", "at least 1 or 'auto'"]),
        (["rollout.decode_budget_ms=0"], ["rollout.decode_budget_ms = 0", "1 or 'none'"]),
    ],
    ids=[
        *("model", "key", "type", "dataset", "config-file", "length", "long-prompts", "strategy"),
        *("repack-policy", "repack-interval", "repack-release", "max-batch", "decode-budget"),
    ],
)
def test_config_mistakes(refused: Refused, arguments: list[str], words: list[str]) -> None:
    message = refused(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", ["empty.jsonl", "empty"]),
        ('{"question": "1+1", "answer": "2"}\n', ["prompt", "question"]),
        ('{"prompt": "1+1", "answer": "2"}\nnot json\n', ["line 2", "JSON"]),
    ],
    ids=["empty", "no-prompt-column", "not-json"],
)
def test_data_mistakes(refused: Refused, tmp_path: Path, rows: str, words: list[str]) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text(rows)
    message = refused("data.dataset=", f"data.train_files={file}")
    assert all(word in message for word in words), message


def test_a_reward_file_that_does_not_import(refused: Refused, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(9)))
    reward = tmp_path / "reward.py"
    reward.write_text("import no_such_module_anywhere\n")
    message = refused(
        "data.dataset=", f"data.train_files={data}", f"reward.custom_reward_function.path={reward}"
    )
    assert str(reward) in message
    assert "no_such_module_anywhere" in message


def test_a_port_in_use(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(f"coordinator.port={port}")
    assert str(port) in message
    assert "coordinator.port" in message


@pytest.mark.process
def test_a_run_directory_that_exists_is_left_as_it_is(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "quickstart" / "precious"
    kept.parent.mkdir()
    kept.write_text("data")
    done = cli("train", "-c", "configs/recipes/words/run.toml", f"run.output_dir={tmp_path}")
    assert done.returncode == 2
    assert str(kept.parent) in done.stderr
    assert "run.name" in done.stderr
    assert kept.read_text() == "data"
    assert [p.name for p in tmp_path.iterdir()] == ["quickstart"]


@pytest.mark.process
def test_dry_run_shows_the_plan_and_starts_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "train",
        "-c",
        str(ROOT / "configs/recipes/words/run.toml"),
        "--dry-run",
        f"run.output_dir={tmp_path / 'runs'}",
        "--trainer.total_training_steps",
        "7",
    )
    assert done.returncode == 0, done.stderr
    assert "7 of 16 prompts x 8 responses" in done.stdout
    assert "Spell this word backward" in done.stdout
    assert not (tmp_path / "runs").exists()
