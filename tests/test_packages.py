"""Packages for other machines: the wheel and the image train the model that they bring."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laminar import __version__

ROOT = Path(__file__).parents[1]
SKIPPED = 77


def test_every_file_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == __version__


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["try_wheel.sh", "try_install.sh"])
def test_what_is_installed_elsewhere_trains(name: str, tmp_path: Path) -> None:
    """By the wheel in a fresh environment; by the images' installer in a clean root."""
    command = [ROOT / "tools" / "image" / name, tmp_path / "place"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert not done.returncode, (done.stdout + done.stderr)[-6000:]
    assert f"laminar {__version__}" in done.stdout and "steps            10 in" in done.stdout
