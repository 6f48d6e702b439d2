"""A small valid manifest, for tests of manifest readers.

Gives   SHAPES, TENSORS, PROBE, build
"""

from __future__ import annotations

from typing import Any

from laminar.weights.version import manifest as mf

SHAPES = [("embed", (5, 8)), ("norm", (3,)), ("scale", ()), ("head", (8, 5))]
TENSORS = mf.make_layout(SHAPES, "float32")
PROBE = mf.Probe(
    sequences=((1, 2, 3), (4, 5)),
    logprobs=((-0.5, -1.0), (-2.0,)),
    tolerance=1e-3,
    mean_tolerance=1e-4,
)


def build(**changes: Any) -> mf.Manifest:
    fields: dict[str, Any] = {
        "version": 7,
        "step": 6,
        "kind": "full",
        "dtype": "float32",
        "total_bytes": 512,
        "tensors": TENSORS,
        "chunk_bytes": 100,
        "chunk_checksums": (1, 2, 3, 4, 5, (1 << 64) - 1),
        "digest": "0123456789abcdef" * 2,
        "probe": PROBE,
    }
    return mf.Manifest(**{**fields, **changes})
