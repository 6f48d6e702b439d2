"""A violated invariant: its name, the details, and the subjects whose history shows it.

Reads   nothing
Gives   Violation
"""

from __future__ import annotations


class Violation(AssertionError):
    """A violated invariant, its details, and the subjects concerned."""

    def __init__(self, invariant: str, details: str, *subjects: str) -> None:
        """Name the subjects by id: trajectories, groups, versions (`v3`) or actors."""
        super().__init__(f"{invariant}: {details}")
        self.invariant = invariant
        self.details = details
        self.subjects = subjects
