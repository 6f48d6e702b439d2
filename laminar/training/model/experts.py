"""Tokens that each expert of a mixture gets in the passes of a step.

Reads   the choices of the routers, by hooks on the experts of a model
Gives   RouterLoad, `cast_experts`

An expert without tokens has no gradient, and usually never gets tokens again. A loss term against
that would depend on the packing of sequences into passes, so the load is only reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.training.model.lora_targets import EXPERTS
from laminar.training.model.micro_batches import MicroBatch
from laminar.training.ranks import Ranks

LOAD_MAX, LOAD_DEAD = "actor/router_load/max", "actor/router_load/dead"


def list_experts(model: nn.Module) -> list[nn.Module]:
    """Return for each layer the module that has all its experts, stacked."""
    return [module for name, module in model.named_modules() if name.endswith(EXPERTS)]


def cast_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the matrices of experts that are not trained; they compute in their type."""
    for module in list_experts(model):
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)


class RouterLoad:
    """Scored tokens by layer and expert, over the passes with a gradient since the last report."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._index: Tensor | None = None  #: positions of the tokens to be counted
        self._counts: list[Tensor] = []
        for layer, module in enumerate(list_experts(model) if model is not None else ()):
            number = int(next(module.parameters(recurse=False)).shape[0])
            self._counts.append(torch.zeros(number, dtype=torch.int64))
            module.register_forward_pre_hook(partial(self._count, layer))

    @contextmanager
    def count_pass(self, micro: MicroBatch) -> Iterator[None]:
        """Count the scored tokens of a forward pass within the context, unless it is empty."""
        self._index = None if micro.empty else micro.rows.index
        try:
            yield
        finally:
            self._index = None

    def _count(self, layer: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._index is None or not torch.is_grad_enabled():
            return
        chosen = inputs[1].index_select(0, self._index).flatten()
        counts = self._counts[layer]
        counts += torch.bincount(chosen, minlength=len(counts)).cpu()

    def report_metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics over all ranks, and begin again; none without experts or tokens."""
        if not self._counts:
            return {}
        counts = ranks.all_reduce(torch.stack(self._counts)).double()
        for own in self._counts:
            own.zero_()
        if not counts.sum():
            return {}
        shares = counts * counts.shape[1] / counts.sum(1, keepdim=True)
        return {LOAD_MAX: float(shares.max()), LOAD_DEAD: float((counts == 0).sum())}
