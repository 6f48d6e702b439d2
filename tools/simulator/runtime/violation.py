"""A promise was broken: which one, how, and whose story tells about it.

Reads   nothing
Gives   Violation
"""

from __future__ import annotations


class Violation(AssertionError):
    """The name of an invariant, what contradicts it, and what was hurt."""

    def __init__(self, invariant: str, details: str, *subjects: str) -> None:
        """`subjects`: ids of trajectories, groups, versions (`v3`) or actors."""
        super().__init__(f"{invariant}: {details}")
        self.invariant = invariant
        self.details = details
        self.subjects = subjects
