"""The processes that train one model together: assignment of rows, and sums over all ranks.

Gives   Ranks; SINGLE_RANK, a trainer of one process
Raises  errors of torch.distributed if another rank is gone or late

Every rank gets the whole batch and takes whole sequences of it, so that decisions made from the
batch are the same everywhere, and results of the model are summed. Shares depend on the lengths
alone: each rank knows those of the others without communication. A sharded model needs all ranks
in every pass, so all have the same number of passes; a rank without sequences left runs an empty
one. A trainer of one process has all sequences, and does not use torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """The group as seen by one of its ranks."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        """Set the rank up; `group`: of all `size` ranks, optional for one rank without offload."""
        self.rank, self.size = rank, size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by the sum over all ranks, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def build_mesh(self, device: torch.device) -> DeviceMesh:
        assert self._group is not None
        return DeviceMesh.from_group(self._group, device.type)


SINGLE_RANK = Ranks()


def assign_sequences(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return each rank's sequences, ascending; longest first, to the rank with fewest tokens."""
    found: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = tokens.index(min(tokens))
        found[rank].append(i)
        tokens[rank] += lengths[i]
    return [sorted(share) for share in found]


def join_rank_group(
    store: Path, rank: int, size: int, device: torch.device, timeout_s: float
) -> Ranks:
    """Wait for the other ranks at this file, which must be new.

    `timeout_s`: longest wait for another rank, here and in each sum. Traffic between ranks stays
    on this machine: gloo and NCCL have no authentication, and listen on loopback.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Ranks(rank, size, dist.group.WORLD)
