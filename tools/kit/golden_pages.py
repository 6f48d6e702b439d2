"""Golden pages: the output of a command for a known run, as one readable text.

Reads   tests/golden_pages/NAME.txt; GOLDEN_PAGES=write in the environment rewrites them
Gives   check

A page is compared as a whole, so a changed sentence is one line of a diff and needs no change of a
test. Facts that a page does not show keep separate tests.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "tests" / "golden_pages"


def check(name: str, text: str) -> None:
    """Assert that the page is this text, ignoring spaces at the end of lines."""
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN_PAGES") == "write":
        path.write_text(text)
    assert text == path.read_text(), (
        f"{path} differs: check the difference; if the new text is correct, GOLDEN_PAGES=write "
        "pytest ... rewrites the page"
    )
