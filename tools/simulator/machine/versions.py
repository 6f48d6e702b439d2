"""Weight versions of a few bytes, and the manifests that belong to them.

Reads   nothing
Gives   SHAPES, weights_of, manifest_for; ModelDirectory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from laminar.weights.version.hashes import Bytes, build_manifest
from laminar.weights.version.manifest import Manifest, Probe, make_layout

PROBE_LOGPROB = -0.5
SHAPES = (("w", (32,)),)
TENSORS = make_layout(SHAPES, "float32")
PROBE = Probe(sequences=((1, 2),), logprobs=((PROBE_LOGPROB,),), tolerance=0.1, mean_tolerance=0.1)
VERSION_BYTES, CHUNK_BYTES = 128, 16


@dataclass(slots=True)
class ModelDirectory:
    """The content of a directory on the shared disk, which outlives its writer."""

    weights: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    moment: str = ""  #: of the optimizer; empty: missing
    extra: Mapping[str, bytes] = field(default_factory=dict)
    synced: bool = True
    damaged: bool = False  #: whether a part that only the trainer reads is damaged


def weights_of(name: str) -> Bytes:
    """Return the weights of this name."""
    return np.frombuffer(xxhash.xxh3_128_digest(name.encode()) * 8, np.uint8)


def manifest_for(view: Bytes, version: int, step: int) -> Manifest:
    """Build the manifest of these bytes under this version number."""
    return build_manifest(
        view, version=version, step=step, tensors=TENSORS, probe=PROBE, chunk_bytes=CHUNK_BYTES
    )
