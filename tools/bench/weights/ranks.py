"""Cost of a publish for a trainer rank: writing its rows to the slot, against a plain copy.

Gives   `layout`, of a version; `ranks_rounds`: CPU seconds of all ranks together, by round and way

The ranks are processes connected by gloo, with tensors sharded like those of FSDP2. A slot is a
file in memory that all have mapped. Its pages and those of the tensors are populated before the
first round.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from laminar.training.ranks import RankLayout, Ranks, Rendezvous, join_rank_group
from laminar.training.shared_safetensors import get_row_range, rows_of
from laminar.weights.version import manifest as mf
from laminar.weights.version.restored import SharedBytes
from laminar.weights.version.shared_rows import RowWriter
from laminar.weights.version.slot_writer import WriteTarget, encode
from laminar.weights.version.tensors import write_tensors

RANKS = 2
WAYS = ("publish", "copy")
LIMIT_S = 300.0
WIDTH, VOCABULARY = 1024, 4096
CPU = torch.device("cpu")

Way = Callable[[], None]


def layout(size: int) -> tuple[mf.TensorSpec, ...]:
    """Lay out an embedding and layers of two matrices and a norm, about `size` bytes in all."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (VOCABULARY, WIDTH))]
    layer = [("up", (3 * WIDTH, WIDTH)), ("down", (WIDTH, 3 * WIDTH)), ("norm", (WIDTH,))]
    each = sum(math.prod(shape) for _, shape in layer)
    for number in range(max(1, (size // 4 - VOCABULARY * WIDTH) // each)):
        shapes += [(f"{number}.{name}", shape) for name, shape in layer]
    return mf.make_layout(shapes, "float32")


def ranks_rounds(specs: tuple[mf.TensorSpec, ...], rounds: int) -> Iterator[dict[str, float]]:
    """Yield the CPU seconds of each round by way; raise RuntimeError if the slot's bytes differ."""
    slot = SharedBytes("ranks", mf.check_tensors(specs))
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        store, pipes, processes = Path(directory) / "meeting", list[Connection](), []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            args = (rank, store, slot.path, specs, theirs)
            processes.append(context.Process(target=_serve, args=args, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        expected = np.empty_like(slot.view)
        write_tensors(expected, specs, ((s.name, _values(s)) for s in specs))
        for number in range(rounds + 1):
            spent = {way: _spent(pipes, way, slot, expected) for way in WAYS}
            if number:  # the first round connects and touches the mapped pages
                yield spent
        for pipe in pipes:
            pipe.send("")
        for process in processes:
            process.join()
    slot.close()


def _spent(pipes: list[Connection], way: str, slot: SharedBytes, expected: np.ndarray) -> float:
    slot.view[:] = 0
    for pipe in pipes:
        pipe.send(way)
    spent = 0.0
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(LIMIT_S):
            raise RuntimeError(f"rank {rank} did not reply within {LIMIT_S:g} s")
        spent += pipe.recv()
    if not np.array_equal(slot.view, expected):
        raise RuntimeError(f"the slot has wrong bytes after {way}")
    return spent


def _values(spec: mf.TensorSpec) -> torch.Tensor:
    count = math.prod(spec.shape)
    return torch.arange(spec.offset, spec.offset + count, dtype=torch.float32).view(spec.shape)


def _serve(
    rank: int, store: Path, slot: str, specs: tuple[mf.TensorSpec, ...], pipe: Connection
) -> None:
    torch.set_num_threads(1)
    meeting = Rendezvous(dist.FileStore(str(store), RANKS))  # type: ignore[attr-defined]
    ranks = join_rank_group(meeting, rank, RankLayout(1, RANKS, "node"), CPU, LIMIT_S)
    ways = dict(zip(WAYS, _ways(ranks, slot, specs), strict=True))
    while way := pipe.recv():
        dist.barrier()
        begun = time.process_time()
        ways[way]()
        pipe.send(time.process_time() - begun)
    os._exit(0)


def _ways(ranks: Ranks, slot: str, specs: tuple[mf.TensorSpec, ...]) -> tuple[Way, Way]:
    mesh, put = ranks.build_mesh(CPU), RowWriter()
    tensors = {}
    for spec in specs:
        first, end = get_row_range(spec.shape[0], ranks.rank, ranks.size)
        own = _values(spec)[first:end].clone()
        tensors[spec.name] = DTensor.from_local(own, mesh, [Shard(0)])
    nbytes = mf.check_tensors(specs)
    target = encode(WriteTarget(path=slot, offset=0, nbytes=nbytes, specs=specs, kept=True))
    view = np.memmap(slot, np.uint8, "r+")

    def publish() -> None:
        rows = ((name, rows_of(tensor)) for name, tensor in tensors.items())
        put(target, ((name, r.first, r.data) for name, r in rows))

    def copy() -> None:
        for spec in specs:
            _, first, data = rows_of(tensors[spec.name])
            begin = spec.offset + first * (spec.nbytes // spec.shape[0])
            nbytes = data.numel() * data.element_size()
            np.copyto(view[begin : begin + nbytes].view(np.float32), data.numpy().reshape(-1))

    return publish, copy
