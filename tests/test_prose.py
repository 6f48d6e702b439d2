"""Phrases, names and beginnings that docs/style.md rules out are found by tools/check/prose.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check import prose


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("the run goes on", True),
        ("is no address", True),
        ("there is no address", False),
        ("it is no longer needed", False),
        ("nobody reads it", True),
        ("besides the first", True),
        ("a plan for the run", False),
    ],
)
def test_phrases(text: str, banned: bool) -> None:
    assert bool(prose.PHRASES.search(text)) == banned


def test_a_tree_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = '"""What it is."""\n\ndef look(nobody):  # the run goes on\n    "see `goes on`"\n'
    for path, text in {"laminar/a.py": code, "README.md": "Nobody.\n```\nnobody\n```\n"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.count_one_word_names() == (1, 1)
    assert prose.count_bad_beginnings() == (1, 2)
    assert prose.find_phrases() == ["laminar/a.py:3: goes on", "README.md:1: Nobody"]
