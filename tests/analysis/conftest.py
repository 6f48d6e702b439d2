"""One made run for all tests of this folder; a test that changes it takes a copy."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli import audit, log, report, samples
from laminar.config import ConfigError
from tools.kit.run_directory import make_run, world_log

Cli = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("made") / "run"
    make_run(run_dir, world_log())
    return run_dir


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `laminar ARGUMENTS`; returns the exit code and what was printed."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    for module in (log, audit, report, samples):
        module.add_parser(subparsers)

    def run(*arguments: object) -> tuple[int, str]:
        parsed = parser.parse_args([str(argument) for argument in arguments])
        try:
            code = parsed.function(parsed)
        except ConfigError as error:
            return 2, str(error)
        return code, capsys.readouterr().out

    return run
