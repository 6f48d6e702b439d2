"""laminar view: mistakes are one sentence with exit code 2; nothing else imports its libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laminar.api import open_run
from laminar.cli.commands import run_command
from laminar.config import dump_config, load_config
from tools.kit.run_directory import make_run, world_log


def write_run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    make_run(run, world_log())
    (run / "config.toml").write_text(
        dump_config(load_config([{"model.name": "m", "data.dataset": "gcd"}]))
    )
    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/none"], "does not exist"),
        (["{tmp}"], "is not a run directory"),
        (["{run}", "--port", "70000"], "--port 70000: give a port"),
        (["{run}", "--origin", "http://x:1"], "--origin http://x:1: give HOST:PORT"),
        ([], "RUN"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    run = write_run(tmp_path)
    code = run_command(["view", *(word.format(tmp=tmp_path, run=run) for word in words)])
    found = capsys.readouterr()
    assert code == 2 and message in found.err and not found.out
    assert len(found.err.strip().splitlines()) == 1 and "Traceback" not in found.err
    assert not (run / "facts").exists(), "nothing is written"


@pytest.mark.parametrize("missing", ["panel", "duckdb"])
def test_a_missing_extra_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
) -> None:
    run = write_run(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert run_command(["view", str(run)]) == 2
    assert 'pip install "laminar-rl[view]"' in capsys.readouterr().err


def test_the_cell_of_a_notebook_carries_its_scripts(tmp_path: Path) -> None:
    """Or it would stay empty where a CDN cannot be reached."""
    panel = pytest.importorskip("panel", reason="the extra `view` is not installed")
    open_run(write_run(tmp_path)).view()
    assert panel.config.inline


def test_no_other_command_imports_its_libraries() -> None:
    code = (
        "import importlib, sys\n"
        "from laminar.cli.commands import COMMANDS\n"
        "[importlib.import_module(f'laminar.cli.{name}') for name in COMMANDS]\n"
        "import laminar.api\n"
        "assert not {'panel', 'bokeh', 'duckdb', 'tornado'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
