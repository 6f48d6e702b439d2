"""docs/metrics.md names every key that a run writes."""

from __future__ import annotations

import re
from pathlib import Path

from laminar.analysis.report.page import FIGURES
from laminar.analysis.report.summary import summarize_run
from laminar.training.metrics import METRICS_BY_LENGTH, TOKEN_MAXIMA, TOKEN_MEANS

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def documented() -> set[str]:
    """Names in backquotes; in a list, a name without a folder belongs to the one before it."""
    found: set[str] = set()
    for line in TEXT.splitlines():
        folder = stem = ""
        for name in re.findall(r"`([^`\s]+)`", line.split("|")[1] if "|" in line else line):
            if name.startswith("_"):
                name = stem + name
            elif "/" not in name and folder:
                name = f"{folder}/{name}"
            folder, stem = name.rpartition("/")[0], re.sub(r"_p\d+$", "", name)
            found.add(name)
    return found


def test_every_key_of_the_summary(copy: Path) -> None:
    summary = summarize_run(copy)
    keys = set(summary) | set(summary["evaluations"][0])
    keys |= {state for shares in summary["time_shares"].values() for state in shares}
    assert keys <= documented()


def test_every_figure_of_the_page_and_of_the_tokens() -> None:
    """A chart of a name that nothing writes would stay empty for ever."""
    assert {key for _, key, *_ in FIGURES} <= documented()
    assert {*TOKEN_MEANS, *TOKEN_MAXIMA, *METRICS_BY_LENGTH} <= documented()
