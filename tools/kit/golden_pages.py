"""Golden pages: what a command prints of a known run, as one text that people can read.

Reads   tests/golden_pages/NAME.txt; GOLDEN_PAGES=write in the environment writes them again
Gives   check

A page is compared as a whole, so a changed sentence is one line of a diff and no change of a test.
Tests of their own stay for facts that a page does not show.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "tests" / "golden_pages"


def check(name: str, text: str) -> None:
    """The page is the text; spaces at the end of lines do not count."""
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN_PAGES") == "write":
        path.write_text(text)
    assert text == path.read_text(), (
        f"{path} differs: check the difference; if the new text is correct, GOLDEN_PAGES=write "
        "pytest ... rewrites the page"
    )
