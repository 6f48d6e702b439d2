"""How close publishing and pulling weights come to one plain copy of the same bytes.

Usage: python tools/bench/publish.py [--layers 6] [--rounds 15]
Prints one JSON line per figure.

publish_copy_ratio   CPU time of write_tensors (many tensors into a warm slot) / one np.copyto
pull_ratio           CPU time of copying all read_tensors out / one np.copyto of the same bytes

CPU time and medians of interleaved rounds, because the machine may be busy. A copy of all bytes at
once is above glibc's non-temporal threshold and a copy of one tensor is below it, so most of a
ratio above 1 is the threshold; run it again with
GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=262144 to see what is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from laminar.weights import manifest as mf
from laminar.weights.arena import SHARED_MEMORY, Arena
from laminar.weights.hashes import checksums
from laminar.weights.transfer import read_tensors, write_tensors

CHUNK_BYTES = 1 << 20
HIDDEN, KV, MLP = 1024, 256, 2816


def model_shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Decoder layers of a 0.5B-sized model, 43 MiB each in float32."""
    attention = [(HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN)]
    shapes = [*attention, (MLP, HIDDEN), (MLP, HIDDEN), (HIDDEN, MLP), (HIDDEN,), (HIDDEN,)]
    return [(f"{layer}.{i}", shape) for layer in range(layers) for i, shape in enumerate(shapes)]


def cpu_medians(*operations: Callable[[], object], rounds: int) -> list[float]:
    """Median CPU seconds of each operation; the first round warms up and is not counted."""
    times: list[list[float]] = [[] for _ in operations]
    for _ in range(rounds + 1):
        for operation, row in zip(operations, times, strict=True):
            start = time.process_time()
            operation()
            row.append(time.process_time() - start)
    return [statistics.median(row[1:]) for row in times]


def measure(arena: Arena, specs: tuple[mf.TensorSpec, ...], rounds: int) -> tuple[float, float]:
    total = mf.check_tensors(specs)
    # From torch, like the tensors: numpy's huge pages alone would make a copy 10 % faster.
    slot, plain = arena.slot(0), torch.ones(total, dtype=torch.uint8).numpy()
    tensors = {spec.name: torch.randn(spec.shape) for spec in specs}
    engine = {spec.name: torch.ones(spec.shape).numpy() for spec in specs}
    write_tensors(slot, specs, tensors.items())
    chunks, digest = checksums(slot, total, CHUNK_BYTES)
    manifest = mf.Manifest(
        version=0, step=0, kind="full", dtype="float32", total_bytes=total, tensors=specs,
        parts=(mf.Part(rank=0, offset=0, nbytes=total),), chunk_bytes=CHUNK_BYTES,
        chunk_checksums=tuple(chunks), digest=digest, probe=None,
    )  # fmt: skip

    def pull() -> None:
        for name, tensor in read_tensors(slot, manifest):
            np.copyto(engine[name], tensor.numpy())

    publish_s, copy_in_s, pull_s, copy_out_s = cpu_medians(
        lambda: write_tensors(slot, specs, tensors.items()),
        lambda: np.copyto(slot[:total], plain),
        pull,
        lambda: np.copyto(plain, slot[:total]),
        rounds=rounds,
    )
    return publish_s / copy_in_s, pull_s / copy_out_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="43 MiB each")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    specs = mf.layout(model_shapes(args.layers), "float32")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        arena = Arena.create(Path(directory) / "arena", 1, mf.check_tensors(specs))
        ratios = measure(arena, specs, args.rounds)
    for name, value in zip(("publish_copy_ratio", "pull_ratio"), ratios, strict=True):
        print(json.dumps({"name": name, "value": round(value, 3), "unit": "ratio"}))


if __name__ == "__main__":
    main()
