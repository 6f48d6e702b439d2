"""Colours of the page: of states, of weight versions, and of cells that mix them.

Reads   nothing
Gives   find_state_colour, version_colour, version_colours, mix_states
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STATE_COLOURS = {
    "busy": "#eef2f7",
    "training": "#5b6b8c",
    "pulling": "#c9b6e4",
    "free": "#e3e6ea",
    "staleness-bound": "#ffd59e",
    "draining": "#ffe9b8",
    "repacked": "#b9e3dd",
    "no-data": "#dfe3e8",
    "groups": "#ffd59e",
    "publish": "#c9b6e4",
    "strategy": "#b9e3dd",
    "start": "#dfe3e8",
    "no-weights": "#dfe3e8",
    "run-ending": "#dfe3e8",
    "down": "#e5484d",
}
VERSION_HUES = (
    "#2563eb", "#0891b2", "#059669", "#65a30d", "#ca8a04", "#ea580c", "#db2777", "#7c3aed",
)  # fmt: skip
"""Colours of versions, in a circle, so that a mean of two versions lies between their colours."""
PAPER = "#ffffff"
STEPS = 16  #: shades between two versions

Colours = NDArray[np.float64]


def find_state_colour(state: str) -> str:
    return STATE_COLOURS.get(state, "#f1dfe6")


def version_colour(version: int) -> str:
    return VERSION_HUES[version % len(VERSION_HUES)]


def version_colours(versions: NDArray[np.float64]) -> Colours:
    """Return the colours of mean versions, [..., 3]."""
    places = np.round(np.where(versions < 0, 0, versions) * STEPS).astype(np.int64)
    found: Colours = _SHADES[places % len(_SHADES)]
    return found


def mix_states(
    states: Sequence[str], shares: Colours, over: Colours, cover: NDArray[np.float64]
) -> NDArray[np.uint32]:
    """Return RGBA cells: states by their shares, [state, row, column], with `over` laid on them."""
    table = np.array([_rgb(find_state_colour(name)) for name in states])
    total = shares.sum(axis=0)[..., None]
    below = np.maximum(1 - total, 0) * _rgb(PAPER)
    below = below + np.tensordot(shares, table, axes=(0, 0)) / np.maximum(total, 1.0)
    alpha = np.clip(cover, 0, 1)[..., None]
    mixed = np.round(below * (1 - alpha) + over * alpha).clip(0, 255).astype(np.uint32)
    red, green, blue = (mixed[..., channel] for channel in range(3))
    found: NDArray[np.uint32] = red | green << 8 | blue << 16 | np.uint32(0xFF000000)
    return found


def _rgb(colour: str) -> Colours:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=np.float64)


def _make_shades() -> Colours:
    hues = np.array([_rgb(hue) for hue in VERSION_HUES])
    following = np.roll(hues, -1, axis=0)
    part = np.arange(STEPS)[None, :, None] / STEPS
    shades: Colours = hues[:, None] * (1 - part) + following[:, None] * part
    return shades.reshape(-1, 3)


_SHADES = _make_shades()
