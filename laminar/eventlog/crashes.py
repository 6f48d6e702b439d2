"""What coordinators crashed on: a small file each, beside the log, for those that come after them.

Reads / writes   crash-00000007.json (the number is the coordinator's incarnation)
Raises           DiskError while writing

An event that ended a coordinator is not in the log, and its sender sends it again. So the count is
kept here: too many crashes on the same event, and it is not handled any more.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from laminar.eventlog.whole_files import write_whole
from laminar.names.ports import Disk

CRASHES_MAX = 3
"""Coordinators that may end on one event before it is given up."""
KEPT = 64
"""Files; the oldest go first."""

_NAME = re.compile(r"crash-(\d{8,})\.json")


class Crash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of one coordinator."""

    incarnation: int
    what: str  #: the event, named alike each time it comes
    error: str  #: what was raised, and where


def record_crash(disk: Disk, crash: Crash) -> None:
    """Durable on return."""
    write_whole(disk, f"crash-{crash.incarnation:08d}.json", msgspec.json.encode(crash))
    for name in _names(disk)[:-KEPT]:
        disk.remove(name)


def crashes(disk: Disk) -> list[Crash]:
    """The crashes that are kept, oldest first; a damaged file is passed over."""
    found = []
    for name in _names(disk):
        try:
            found.append(msgspec.json.decode(disk.read(name), type=Crash))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return found


def given_up(found: list[Crash]) -> dict[str, Crash]:
    """The events that were crashed on too often, with the last crash of each."""
    times = Counter(crash.what for crash in found)
    return {crash.what: crash for crash in found if times[crash.what] >= CRASHES_MAX}


def _names(disk: Disk) -> list[str]:
    numbers = ((int(match[1]), name) for name in disk.names() if (match := _NAME.fullmatch(name)))
    return [name for _, name in sorted(numbers)]
