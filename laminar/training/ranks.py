"""The processes that train one model together: assignment of rows, and sums over all ranks.

Gives   RankLayout, Ranks; SINGLE_RANK, a trainer of one process
Raises  errors of torch.distributed if another rank is gone or late

Every rank gets the whole batch and takes whole sequences of it, so that decisions made from the
batch are the same everywhere, and results of the model are summed. Shares depend on the lengths
alone: each rank knows those of the others without communication. A sharded model needs all ranks
in every pass, so all have the same number of passes; a rank without sequences left runs an empty
one. A trainer of one process has all sequences, and does not use torch.distributed.

Ranks of several nodes form a grid: a row is a node, a column has the ranks at the same place of
each. If each node has the whole model, only gradients travel along the columns. In any layout the
first node alone writes weights and files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laminar.config import Config
from laminar.training.rank_store import StoreRequest, Submit

GET_S = 1800.0  #: torch's default for a store
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankLayout(NamedTuple):
    """Arrangement of the ranks; those of a node are neighbors, the first node has rank 0."""

    nodes: int
    ranks: int  #: of each node
    shard: str  #: "node": each node has the whole model (HSDP); "all": all ranks divide it

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    @property
    def replicates(self) -> bool:
        """Whether several nodes have the whole model each."""
        return self.nodes > 1 and self.shard == "node"

    @staticmethod
    def from_config(config: Config) -> RankLayout:
        trainer = config.trainer
        shard = "all" if trainer.shard == "all" and trainer.nodes > 1 else "node"
        return RankLayout(trainer.nodes, trainer.ranks, shard)


class RankStore(dist.Store):  # type: ignore[name-defined,misc]
    """The store of one rank, called by torch from any thread."""

    def __init__(self, rank: int, submit: Submit) -> None:
        super().__init__()
        self._rank, self._submit = rank, submit
        self._number, self._lock = 0, threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        self._request("set", [key], value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        return self._request("get", [key])

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", [key], b"%d" % amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = GET_S if timeout is None else timeout.total_seconds()
        for key in keys:
            self._request("get", [key], limit_s=limit_s)

    def _request(
        self, action: Any, keys: Sequence[str], value: bytes = b"", limit_s: float = GET_S
    ) -> bytes:
        with self._lock:
            self._number += 1
            number = self._number
        request = StoreRequest(
            rank=self._rank, number=number, action=action, keys=tuple(keys), value=value
        )
        try:
            return self._submit(request).result(limit_s)
        except TimeoutError:
            raise TimeoutError(f"no rank has set {keys[0]!r} within {limit_s:g} s") from None


class Rendezvous(NamedTuple):
    """Meeting point of the ranks of a group."""

    store: Any  #: a new dist.Store, which torch does not type
    interface: str = "lo"  #: network of the ranks, unless the user's variables name another


class NodeGroups(NamedTuple):
    """Groups of a rank if there are several nodes."""

    row: dist.ProcessGroup  #: ranks of its node
    column: dist.ProcessGroup  #: ranks at its place of each node
    copies: dist.ProcessGroup  #: the same, for what is sent while the model is trained


class Ranks:
    """The group as seen by one of its ranks."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        layout: RankLayout | None = None,
        parts: NodeGroups | None = None,
    ) -> None:
        """Set the rank up; `group`: of all `size` ranks, optional for one rank without offload.

        `layout`: of the same size; without it, all ranks are on one node. `parts`: if there are
        several."""
        self.rank, self.size = rank, size
        self._group, self.parts = group, parts
        self.layout = layout or RankLayout(1, size, "node")

    @property
    def on_first_node(self) -> bool:
        return self.rank < self.layout.ranks

    @property
    def reads_files(self) -> bool:
        """Whether this rank reads its rows from files, not from the first node."""
        return self.on_first_node or not self.layout.replicates

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by the sum over all ranks, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def share_rows(self, rows: Tensor) -> None:
        """Replace rows by those of the first node if every node has the whole model."""
        if self.layout.replicates and rows.numel():
            assert self.parts is not None
            sent = rows.contiguous()
            dist.broadcast(sent, group_src=0, group=self.parts.column)
            if sent is not rows:
                rows.copy_(sent)

    def build_mesh(self, device: torch.device) -> DeviceMesh:
        """Build the mesh of a sharded model: its last dimension has the shards."""
        assert self._group is not None
        if not self.layout.replicates:
            return DeviceMesh.from_group(self._group, device.type)
        assert self.parts is not None
        grid = torch.arange(self.size).view(self.layout.nodes, self.layout.ranks)
        groups, names = [self.parts.column, self.parts.row], ("nodes", "ranks")
        return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=names)


SINGLE_RANK = Ranks()


def device_of(name: str) -> torch.device:
    """Return the device of trainer.device; auto is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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
    meeting: Rendezvous, rank: int, layout: RankLayout, device: torch.device, timeout_s: float
) -> Ranks:
    """Wait for the other ranks, and return the group.

    `timeout_s`: longest wait for another rank, here and in each sum. gloo and NCCL have no
    authentication: ranks of one node listen on loopback, those of several need a private network.
    """
    for name in INTERFACE_VARIABLES:
        os.environ.setdefault(name, meeting.interface)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=meeting.store,
        rank=rank,
        world_size=layout.size,
        timeout=timeout,
    )
    parts = form_node_groups(rank, layout, timeout)
    return Ranks(rank, layout.size, dist.group.WORLD, layout, parts)


def form_node_groups(rank: int, layout: RankLayout, timeout: timedelta) -> NodeGroups | None:
    """Form the groups of all rows and columns, which every rank does; return those of this rank.

    None: there is a single node, or the rank is not in the layout."""
    if layout.nodes == 1:
        return None
    every = range(layout.size)
    rows = [every[i : i + layout.ranks] for i in every[:: layout.ranks]]
    columns = [every[i :: layout.ranks] for i in every[: layout.ranks]]
    made = [dist.new_group(list(members), timeout=timeout) for members in rows + 2 * columns]
    if rank not in every:
        return None
    node, place = divmod(rank, layout.ranks)
    copies = made[layout.nodes + layout.ranks :]
    return NodeGroups(made[node], made[layout.nodes + place], copies[place])
