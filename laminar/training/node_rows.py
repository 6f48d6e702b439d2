"""Rows of all nodes, brought to the ranks of the first one.

Reads   rows of tensors, as each rank has them
Gives   `bring_rows`
Raises  errors of torch.distributed if another rank is gone or late

A slot of weights is memory of one machine, and files appear under their name only when complete,
so the first node alone writes them. If the model is divided among all ranks, each rank of the first
node gets the rows of the ranks at its place of the other nodes, one tensor at a time: no node needs
memory for the whole model. Sizes are exchanged once, because a rank may have no rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from laminar.training.ranks import Ranks
from laminar.training.shared_safetensors import Rows


def bring_rows(
    ranks: Ranks,
    held: Mapping[str, Rows],
    found: Iterable[tuple[str, Rows]],
    *,
    copied: bool,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Rows]]:
    """Yield this rank's rows of each tensor, and on the first node those brought from the others.

    Every rank iterates to the end; one of another node sends its rows and yields nothing. `found`
    has the tensors of `held` in their order, maybe computed when requested. `copied`: the rows are
    a copy, sent while the model is trained. `dtype`: rows are sent in this type."""
    if ranks.parts is None or ranks.layout.replicates:
        yield from found
        return
    column = ranks.parts.copies if copied else ranks.parts.column
    own = ranks.rank // ranks.layout.ranks
    for (name, rows), spans in zip(found, _exchange_spans(held, column), strict=True):
        sent = dtype or rows.data.dtype
        if own:
            if spans[own][1]:
                dist.send(rows.data.to(sent).contiguous(), group=column, group_dst=0)
            continue
        yield name, rows
        for node, (first, count) in enumerate(spans[1:], 1):
            if count:
                data = rows.data.new_empty((count, *rows.shape[1:]), dtype=sent)
                dist.recv(data, group=column, group_src=node)
                yield name, Rows(rows.shape, first, data)


def _exchange_spans(
    held: Mapping[str, Rows], column: dist.ProcessGroup
) -> list[list[tuple[int, int]]]:
    """Return for each tensor the first row and the number of rows that each node has to send."""
    spans = [(0, 0) if r.replicated else (r.first, len(r.data)) for r in held.values()]
    if not spans:
        return []
    own = torch.tensor(spans)
    of_nodes = [torch.empty_like(own) for _ in range(column.size())]
    dist.all_gather(of_nodes, own, group=column)
    found: list[list[tuple[int, int]]] = torch.stack(of_nodes, 1).tolist()
    return found
