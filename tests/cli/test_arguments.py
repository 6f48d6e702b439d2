"""Words of a command line: in any order, in either spelling; a mistake is one sentence."""

from __future__ import annotations

import argparse

import pytest

from laminar.cli.commands import COMMANDS, build_parser, run_command
from laminar.config import ConfigError, load_config
from laminar.names import exit_codes


def parsed(line: str) -> argparse.Namespace:
    return build_parser().parse_args(["train", *line.split()])


@pytest.mark.parametrize(
    "line",
    [
        "-c a.toml --dry-run seed=1 trainer.test_freq=5",
        "seed=1 --dry-run trainer.test_freq=5 -c a.toml",
        "seed=1 -c a.toml trainer.test_freq=5 --dry-run",
        "--seed 1 --trainer.test_freq 5 --dry-run -c a.toml",
        "--seed=1 --dry-run --config=a.toml --trainer.test_freq=5",
        "--seed 1 --config a.toml trainer.test_freq=5 --dry-run",
        "seed=1 -ca.toml --dry-run -- trainer.test_freq=5",
    ],
)
def test_every_order_and_spelling_says_the_same(line: str) -> None:
    found = parsed(
        line.replace(" -- trainer.test_freq=5 --dry-run", " --dry-run -- trainer.test_freq=5")
    )
    assert (found.config, found.dry_run) == (["a.toml"], True)
    assert found.overrides == ["seed=1", "trainer.test_freq=5"]
    assert found.move_old is False


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("--optim.lr -1e-6", ["optim.lr=-1e-6"]),
        ("--seed -3", ["seed=-3"]),
        ("--optim.lr=-1e-6", ["optim.lr=-1e-6"]),
        ("--data.dataset_config {a=1}", ["data.dataset_config={a=1}"]),
        ("--data.train_files --data.jsonl", None),
        ("seed=1 seed=2 --seed 3", ["seed=1", "seed=2", "seed=3"]),
        ("--run.name a run.name=b", ["run.name=a", "run.name=b"]),
        ("run.name=b --run.name a", ["run.name=b", "run.name=a"]),
        ("--max-steps 3", ["trainer.total_training_steps=3"]),
        ("--max-steps=3 --output-dir x", ["trainer.total_training_steps=3", "run.output_dir=x"]),
        ("trainer.total_training_steps=9 --max-steps 3",
         ["trainer.total_training_steps=9", "trainer.total_training_steps=3"]),
        ("--data.system_prompt=a=b", ["data.system_prompt=a=b"]),
        ("seed=", ["seed="]),
        ("", []),
    ],
)  # fmt: skip
def test_overrides_keep_their_order_so_that_the_last_one_wins(
    line: str, overrides: list[str] | None
) -> None:
    if overrides is None:
        with pytest.raises(ConfigError, match=r"--data\.train_files needs a value"):
            parsed(line)
    else:
        assert parsed(line).overrides == overrides


@pytest.mark.parametrize("name", ["2026-01-01", "1e3", "007", "true", "1_000", "12:30:00"])
def test_what_is_a_string_is_taken_as_it_was_typed(name: str) -> None:
    overrides = ["model.name=m", "data.dataset=gcd", f"run.name={name}"]
    assert load_config([], overrides).run.name == name
    assert load_config([], [*overrides, f'run.name="{name}"']).run.name == name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --dryrun", ["--dryrun", "--dry-run"]),
        ("train --dryrun seed=1", ["--dryrun", "--dry-run"]),
        ("train --moveold -c a.toml", ["--moveold", "--move-old"]),
        ("train --sed 3", ["--sed", "seed"]),
        ("train --dry-run=yes", ["--dry-run", "'yes'"]),
        ("train --dry", ["--dry", "--dry-run"]),
        ("train --seed", ["--seed needs a value"]),
        ("train --seed --dry-run", ["--seed needs a value"]),
        ("train -x", ["-x"]),
        ("train seed 1", ["'seed'", "key=value"]),
        ("train =3", ["'=3'"]),
        ("train -c", ["-c"]),
        ("train -- --seed", ["'--seed'", "key=value"]),
        ("train model.path=m", ["model.path", "model.name"]),
        ("train --model.path m", ["model.path", "model.name"]),
        ("train --seed three model.name=m data.dataset=d", ["seed", "three", "whole number"]),
        ("trian", ["trian", "train"]),
        ("", ["COMMAND"]),
        ("log", ["COMMAND"]),
        ("log dump", ["RUN"]),
        ("log dump runs/x -n many", ["-n", "many"]),
        ("log dump runs/x -n 0", ["-n", "0"]),
        ("log dump runs/x --stats --raw", ["--raw", "--stats"]),
        ("log tail runs/x", ["log tail is now", "log dump -n 20 runs/x"]),
        ("log why step-1 configs", ["RUN comes before ID", "log why configs step-1"]),
        ("log stats runs/x", ["log dump --stats runs/x"]),
        ("log export runs/x --parquet t", ["log sql RUN", "--format parquet -o FILE"]),
        ("log replay runs/x --unt 3", ["--unt"]),
        ("report", ["RUN"]),
        ("report a --jsno", ["--jsno"]),
        ("audit runs/x seed=1", ["seed=1"]),
    ],
)
def test_a_mistake_is_one_sentence(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(line.split()) == exit_codes.USER_ERROR
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("laminar: "), said
    assert all(word in said[0] for word in words), said[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_with_its_help(name: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args([name, "--help"])


def test_help_tells_how_settings_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["train", "--help"], ["train", "seed=1", "-h"]):
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args(line)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("--dry-run", "--max-steps", "--key value"))
