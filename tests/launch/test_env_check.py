"""What is shown of an environment's reset before a run starts, and what ends the start."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from laminar.cli.commands import run_command
from laminar.config import Config, ConfigError
from laminar.config.tasks import EnvConfig
from laminar.launch.env_check import show_beginnings
from laminar.tasks.data.prompts import PromptRow

pytestmark = pytest.mark.process

ROWS = [PromptRow(i, "Go.", None, {"where": f"room {i}"}, "rooms") for i in range(3)]


def shown(tmp_path: Path, reset: str, **env: float) -> list[str]:
    path = tmp_path / "own.py"
    path.write_text(
        f"import os, time\nclass Own:\n    def reset(self, {reset}\n"
        "    def go(self):\n        'Go.'\n"
    )
    out = io.StringIO()
    config = Config(env=EnvConfig(path=str(path), **env))
    show_beginnings(config, ROWS, Console(file=out, soft_wrap=True))
    return out.getvalue().splitlines()


def test_what_reset_says_for_three_rows(tmp_path: Path) -> None:
    """One that fails does not end the start."""
    says = "where): return {'room 0': None, 'room 2': where}[where]"
    first, *lines = shown(tmp_path, says)
    assert "own.py" in first and "3 rows" in first
    assert lines[0].split() == ["row", "0", "nothing"] and "'room 2'" in lines[2]
    assert "FAILED" in lines[1] and "KeyError" in lines[1] and "own.py:3" in lines[1]


@pytest.mark.parametrize(
    ("reset", "word"),
    [
        ("number): pass", "missing 1 required positional argument: 'number'"),
        ("**row): raise OSError('no database')", "no database"),
        ("**row): os._exit(3)", "exit code 3"),
        ("**row): time.sleep(60)", "longer than env.tool_timeout_s = 0.5 s"),
    ],
)
def test_reset_that_works_for_no_row_is_refused(tmp_path: Path, reset: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shown(tmp_path, reset, tool_timeout_s=0.5)
    said = str(caught.value)
    assert word in said and "reward.trial = false" in said and "\n" not in said


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("import nothing_like_this", ["does not import", "No module named"]),
        ("def solve(task, endpoint): return 1", ["on all 3 rows", "it returned 1"]),
        ("def solve(task, endpoint): raise OSError('no docker')", ["no docker (mine.py:1)"]),
    ],
)
def test_an_agent_that_cannot_begin_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], agent: str, words: list[str]
) -> None:
    file, runs = tmp_path / "mine.py", tmp_path / "runs"
    file.write_text(agent)
    config = str(Path(__file__).parents[2] / "configs/agents/openai_calculator.toml")
    settings = [f"agents.run={file}:solve", f"run.output_dir={runs}", "data.dataset_size=300"]
    assert run_command(["train", "-c", config, *settings, "data.val_size=8"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ["mine.py", *words]), said
    assert "Traceback" not in said and not runs.exists()
