"""Which version a relay sends to its successor next.

Reads   what a relay and its successor hold
Gives   next_version
"""

from __future__ import annotations

from collections.abc import Collection


def next_version(
    mine: Collection[int],
    held: Collection[int],
    partial: Collection[int],
    declined: Collection[int],
) -> int | None:
    """What to send to a successor that holds `held` and has begun `partial`.

    The version it has begun, if that is among `mine` (complete here or on its way), so that what
    it has is not thrown away; else the newest, whatever lies between. None: nothing it needs.
    """
    newest_held = max(held, default=-1)
    wanted = [version for version in mine if version > newest_held and version not in declined]
    begun = [version for version in wanted if version in partial]
    return max(begun or wanted, default=None)
