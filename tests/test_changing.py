"""docs/changing.md: the files that it names exist, and have the names that stand beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "changing.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
CHANGES = {
    "Add an event", "Change a decision", "Add a setting", "Add a command", "Add a role",
    "Add an engine", "Add a batch strategy",
    "Add a reward signature", "Add a metric",
}  # fmt: skip


def steps(section: str) -> list[str]:
    return [" ".join(step.split()) for step in re.split(r"^(?:\d+\.|$)", section, flags=re.M)]


def backquoted(step: str) -> tuple[list[str], list[str]]:
    """(files, names in the code)"""
    words = re.findall(r"`([^`]+)`", step)
    files = [word for word in words if re.fullmatch(r"[\w./-]+/[\w.-]+\.\w+", word)]
    return files, [word for word in words if re.fullmatch(r"[A-Za-z_][\w.]*", word)]


def test_every_change_has_a_section() -> None:
    assert set(SECTIONS) >= CHANGES


@pytest.mark.parametrize("section", SECTIONS)
def test_files_exist_and_have_the_names(section: str) -> None:
    named = 0
    for step in steps(SECTIONS[section]):
        files, names = backquoted(step)
        missing = [file for file in files if not (ROOT / file).is_file()]
        assert not missing, step
        text = "".join((ROOT / file).read_text() for file in files)
        for name in names if files else ():
            assert re.search(rf"\b{re.escape(name)}\b", text), (name, step)
        named += len(files)
    assert named >= 2, "a change has its files"
