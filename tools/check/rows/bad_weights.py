"""Row 25: damaged weights of a checkpoint are refused before any process uses them.

Reads   configs/models/spell-0.6m
Gives   ROWS

Relays and replicas restore a version by `read_version`, which must raise VersionRestoreError. A
flipped bit that changes no weight (of the header's padding) must restore the same bytes.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load, save

from laminar.run.directory import VERSION_FILE
from laminar.weights.version import checkpoint
from laminar.weights.version import manifest as mf
from laminar.weights.version.checkpoint import MODEL_FILE
from laminar.weights.version.restored import VersionRestoreError
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.real_run import ROOT

MODEL = ROOT / "configs" / "models" / "spell-0.6m"
PROBE = mf.Probe(sequences=((1, 2),), logprobs=((-0.5,),), tolerance=0.1, mean_tolerance=0.1)
FLIPS: dict[Gate, int] = {"pr": 20, "release": 1000}


def damage(whole: bytes, flips: int) -> Iterator[tuple[str, bytes]]:
    """Yield the file with each kind of damage, by its name."""
    yield "a huge header", (1 << 60).to_bytes(8, "little") + whole[8:]
    yield "a pickle", pickle.dumps({"embed": [0.0] * 100})
    yield "a cut file", whole[:-10]
    tensors = load(whole)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    yield "another shape", save({**tensors, name: tensors[name].t().contiguous()})
    for seed in range(flips):
        chance, flipped = random.Random(seed), bytearray(whole)
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        yield f"flip {seed}", bytes(flipped)


def restore(directory: Path) -> bytes | None:
    """Return the bytes that a replica would get; None if they are refused."""
    try:
        restored = checkpoint.read_version(directory, 1)
    except VersionRestoreError:
        return None
    restored.close()
    return restored.view.tobytes()


def run(gate: Gate) -> Figure:
    whole, accepted, count = (MODEL / MODEL_FILE).read_bytes(), [], 0
    with tempfile.TemporaryDirectory() as name:
        directory, tensors = Path(name), load(whole)
        specs = mf.make_layout([(name, tuple(t.shape)) for name, t in tensors.items()], "bfloat16")
        manifest = checkpoint.build_tensor_manifest(
            version=1, step=1, specs=specs, tensors=tensors.items(), probe=PROBE
        )
        (directory / VERSION_FILE).write_bytes(mf.encode(manifest))
        (directory / MODEL_FILE).write_bytes(whole)
        wanted = restore(directory)
        for what, content in damage(whole, FLIPS[gate]):
            (directory / MODEL_FILE).write_bytes(content)
            accepted += [] if restore(directory) in (None, wanted) else [what]
            count += 1
    said = f"{count - len(accepted)} of {count} refused: four kinds of damage, {FLIPS[gate]} flips"
    return Figure(said, wanted is not None and not accepted, ", ".join(accepted))


ROWS = (Row(25, "bad weights are refused before use", "5 of 5", "1,000 flips", run),)
