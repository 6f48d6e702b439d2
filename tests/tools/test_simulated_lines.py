"""The tool that says which lines of the actors simulated seeds execute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_of_the_logic_is_listed_with_its_share() -> None:
    """A single seed makes most of a replica's lines run, and names those that it does not."""
    command = [sys.executable, "tools/simulated_lines.py", "--seeds", "1", "--missing"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line.split() for line in found.stdout.splitlines()]
    shares = {words[3]: float(words[0].rstrip("%")) for words in lines[:-1]}
    files = {path.name for path in (ROOT / "laminar" / "actors").glob("*.py")}
    assert set(shares) == files - {"__init__.py"}, found.stderr
    assert 50 < shares["rollout.py"] < 100
    missing = next(words[4:] for words in lines if words[3] == "rollout.py")
    assert len(missing) > 1
    assert lines[-1][-2:] == ["1", "seeds"]
