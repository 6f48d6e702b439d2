"""Every file and command of docs/tutorial.md, in its order, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"`(\w+\.\w+)`[^`]*```\w+\n(.*?)```", re.DOTALL)


@pytest.mark.long
@pytest.mark.process
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for name, content in BLOCK.findall(text):
        (tmp_path / name).write_text(content)
    (programs := tmp_path / "bin").mkdir()
    for name, prints in {"sbatch": "echo 7", "squeue": "", "scancel": ""}.items():
        (programs / name).write_text(f"#!/bin/sh\n{prints}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    for command in re.findall(r"^    (\w.*)$", BLOCK.sub("", text), re.MULTILINE):
        words, environment = ["sh", "-c", command], os.environ | {"PATH": path}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, (command, done.stdout, done.stderr)
