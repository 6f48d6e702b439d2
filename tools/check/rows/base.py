"""What a row of the reliability scorecard is: a promise, two targets, and a run that tests it.

Reads   nothing
Gives   Row, Figure; the rows themselves are in the modules beside this one

A row runs at the size of a gate: "pr" for every change, "release" once by hand. What it reached is
text for a person and a verdict for the exit code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Gate = Literal["pr", "release"]


class Figure(NamedTuple):
    """What one run of a row reached."""

    reached: str
    passed: bool
    detail: str = ""  #: for a row that fell short: what broke, and how to see it again


class Row(NamedTuple):
    """One promise."""

    number: int
    promise: str
    pr: str  #: target of the PR gate
    release: str  #: target of a release
    run: Callable[[Gate], Figure] | None  #: None: nothing tests it yet
