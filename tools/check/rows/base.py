"""Row of the reliability scorecard: a promise, two targets, and a run that tests it.

Reads   nothing
Gives   Row, Figure; the other modules of this folder define the rows

A row runs at the size of a gate: "pr" for every change, "release" once by hand. Its result is a
text for people and a verdict for the exit code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Gate = Literal["pr", "release"]


class Figure(NamedTuple):
    """Result of one run of a row."""

    reached: str
    passed: bool
    detail: str = ""  #: for a row that fell short: the fault and how to reproduce it


class Row(NamedTuple):
    """A promise with its targets and its test."""

    number: int
    promise: str
    pr: str  #: target of the PR gate
    release: str  #: target of a release
    run: Callable[[Gate], Figure] | None  #: None if no test exists yet
