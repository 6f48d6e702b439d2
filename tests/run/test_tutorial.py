"""docs/tutorial.md, word for word: every command of the page, in its order.

The half on the cluster needs a Slurm; tests/slurm/test_tutorial.py runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.conftest import ROOT

ROWS, CLUSTER = "## Rows, reward, config", "## On the cluster"


def sections() -> dict[str, str]:
    """The indented blocks of each section by its heading, in the order of the page."""
    found: dict[str, str] = {}
    heading = ""
    for line in (ROOT / "docs" / "tutorial.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line
        elif line.startswith("    ") or not line:
            found[heading] = found.get(heading, "") + line.removeprefix("    ") + "\n"
    return found


def run_script(script: str, directory: Path) -> str:
    """What the commands print; the first that fails ends the script."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=directory,
        env={**os.environ, "PATH": path},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.process
def test_every_command_before_the_cluster_works(tmp_path: Path) -> None:
    local = "".join(blocks for heading, blocks in sections().items() if heading != CLUSTER)
    said = run_script(local, tmp_path)
    assert "WARNING" not in said
    assert "step 20" in said and (tmp_path / "comparison.html").is_file()
