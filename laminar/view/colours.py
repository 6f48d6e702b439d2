"""Colours of the page: of states, of weight versions, and of cells that mix them.

Reads   nothing
Gives   find_state_colour, version_colour, version_colours, mix_states
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STATE_COLOURS = {
    "busy": "#eef2f7", "training": "#5b6b8c", "down": "#e5484d", "pulling": "#c9b6e4",
    "publish": "#c9b6e4", "staleness-bound": "#ffd59e", "groups": "#ffd59e", "draining": "#ffe9b8",
    "repacked": "#b9e3dd", "strategy": "#b9e3dd", "free": "#e3e6ea", "no-data": "#dfe3e8",
    "start": "#dfe3e8", "no-weights": "#dfe3e8", "run-ending": "#dfe3e8",
}  # fmt: skip
VERSION_HUES = (
    "#2563eb", "#0891b2", "#059669", "#65a30d", "#ca8a04", "#ea580c", "#db2777", "#7c3aed",
)  # fmt: skip
"""Colours of versions, in a circle, so that a mean of two versions lies between their colours."""
STEPS = 16  #: shades between two versions

Colours = NDArray[np.float64]


def find_state_colour(state: str) -> str:
    return STATE_COLOURS.get(state, "#f1dfe6")


def version_colour(version: int) -> str:
    return VERSION_HUES[version % len(VERSION_HUES)]


def version_colours(versions: NDArray[np.float64]) -> Colours:
    """Return the colours of mean versions, [..., 3]."""
    hues = np.array([_rgb(hue) for hue in VERSION_HUES])
    part = np.arange(STEPS)[None, :, None] / STEPS
    shades = (hues[:, None] * (1 - part) + np.roll(hues, -1, axis=0)[:, None] * part).reshape(-1, 3)
    places = np.round(np.maximum(versions, 0) * STEPS).astype(np.int64)
    found: Colours = shades[places % len(shades)]
    return found


def mix_states(
    states: Sequence[str], shares: Colours, over: Colours, cover: NDArray[np.float64]
) -> NDArray[np.uint32]:
    """Return RGBA cells: states by their shares, [state, row, column], with `over` laid on them."""
    table = np.array([_rgb(find_state_colour(name)) for name in states])
    total = shares.sum(axis=0)[..., None]
    below = np.maximum(1 - total, 0) * 255.0  # white, where nothing is known
    below = below + np.tensordot(shares, table, axes=(0, 0)) / np.maximum(total, 1.0)
    alpha = np.clip(cover, 0, 1)[..., None]
    mixed = np.round(below * (1 - alpha) + over * alpha).clip(0, 255).astype(np.uint32)
    found: NDArray[np.uint32] = mixed @ np.array([1, 1 << 8, 1 << 16], np.uint32)
    return found | np.uint32(0xFF000000)


def _rgb(colour: str) -> Colours:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=np.float64)
