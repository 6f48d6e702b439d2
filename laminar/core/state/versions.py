"""Versions of the weights: the numbers, the step of each, and where each can be loaded from.

Reads   nothing
Gives   Versions and its part Version

Version 0 is the model as it was loaded, and step k makes version k, until a step is repeated after
a loss of the trainer: its first number may have been published, and is not reused.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec


class Version(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version of the weights that is published, owed or saved, or has unfinished work."""

    step: int  #: completed steps
    digest: str = ""  #: as published; empty: not published
    checkpoint: str | None = None  #: directory of its checkpoint, a source if relays evict it
    unfinished: bool = False  #: whether relays are told to evict it last, for its unfinished work

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint is not None


class Versions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The versions of a run. Numbers of versions are -1 if there is none."""

    known: dict[int, Version] = {}  #: those that are needed, by number
    next: int = 0  #: next number
    newest: int = -1  #: highest published version
    owed: int = -1  #: version to publish again, skipped or lost with its relay
    export: int = -1  #: version of the export
    export_path: str = ""
    #: offsets between version numbers and steps: first version of each range, with its step
    first_steps: dict[int, int] = {}

    num_bytes: int = 0  #: bytes of one version, as of the last load; 0: unknown
    #: longest load of a whole version, if twice that exceeds the minimum timeout
    slow_load_ms: int = 0
    #: ps per byte, as measured last: of hops, by the receiving relay, and of loads
    #: (core/versions/load_sources.py)
    ps_per_byte: dict[str, int] = {}
    #: relays that failed to give an older version and have not responded since
    failed_sources: dict[str, None] = {}
    fastest_hop: int = -1  #: minimum time of a hop for a full version, in ps per byte; -1: unknown

    @property
    def newest_step(self) -> int:
        return self.known[self.newest].step if self.newest >= 0 else -1

    @property
    def newest_digest(self) -> str:
        return self.known[self.newest].digest if self.newest >= 0 else ""

    @property
    def unfinished(self) -> list[int]:
        """Versions with unfinished work, ascending, as last sent to relays."""
        return sorted(number for number, version in self.known.items() if version.unfinished)

    @property
    def checkpoint_paths(self) -> dict[int, str]:
        """The directories of checkpoints, by version."""
        paths = {number: version.checkpoint for number, version in self.known.items()}
        return {number: path for number, path in paths.items() if path is not None}

    @property
    def saved_steps(self) -> list[int]:
        """The steps of all checkpoints."""
        return [version.step for version in self.known.values() if version.has_checkpoint]

    def has_checkpoint(self, number: int) -> bool:
        version = self.known.get(number)
        return version is not None and version.has_checkpoint

    def step_of(self, number: int) -> int:
        """Return the completed steps of a version; the export has those of the last step."""
        if number == self.export:
            number -= 1
        for first in reversed(self.first_steps):
            if first <= number:
                return self.first_steps[first] + number - first
        return number

    def allocate_number(self, step: int) -> int:
        """Allocate the next number, for weights of this step."""
        number = self.next
        self.next += 1
        if self.step_of(number) != step:
            self.first_steps[number] = step
        return number

    def record_newest(self, number: int, step: int, digest: str) -> None:
        """Record the newest version."""
        self._get_or_add(number, step).digest = digest
        self.newest = number
        self._forget_unneeded()

    def owe_version(self, number: int, step: int) -> None:
        """Record a version that has to be published again."""
        self._get_or_add(number, step)
        self.owed = number

    def end_export(self, step: int) -> None:
        """Make the export an ordinary version of this step."""
        self.first_steps[self.export] = step
        self.export = -1

    def replace_checkpoints(self, paths: dict[int, str]) -> None:
        """Record all checkpoints, by version."""
        for version in self.known.values():
            version.checkpoint = None
        for number, path in paths.items():
            self._get_or_add(number, self.step_of(number)).checkpoint = path
        self._forget_unneeded()

    def forget_checkpoint(self, number: int) -> None:
        if number in self.known:
            self.known[number].checkpoint = None

    def mark_unfinished(self, numbers: Collection[int]) -> None:
        """Record the versions with unfinished work."""
        for version in self.known.values():
            version.unfinished = False
        for number in numbers:
            self._get_or_add(number, self.step_of(number)).unfinished = True

    def _get_or_add(self, number: int, step: int) -> Version:
        return self.known.setdefault(number, Version(step=step))

    def _forget_unneeded(self) -> None:
        needed = self.newest, self.owed, self.export
        self.known = {
            number: version
            for number, version in self.known.items()
            if number in needed or version.has_checkpoint or version.unfinished
        }
