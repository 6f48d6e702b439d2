"""The state of the optimizer by parameter name, as tensors of a file.

Reads   a model and its AdamW
Writes  the optimizer's state
Gives   `named_moments`, `restore_moments`; ForeignError for tensors that are not this model's

Of every parameter that was ever updated: `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME`, as the
optimizer has them, so that a step after a restart gives the bytes that it would have given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from laminar.training.resume import ForeignError

KINDS = ("exp_avg", "exp_avg_sq", "step")


def named_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """As they are now, not copied."""
    for name, parameter in model.named_parameters():
        if state := optimizer.state.get(parameter):
            for kind in KINDS:
                yield f"{kind}.{name}", state[kind]


def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """In the place of whatever state there is; what is not in the file has had no update."""
    parameters = dict(model.named_parameters())
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        parameter = parameters.get(name)
        if kind not in KINDS or parameter is None:
            raise ForeignError(f"its optimizer has {key!r}, which this model does not")
        if kind != "step" and tensor.shape != parameter.shape:
            raise ForeignError(
                f"its optimizer has {key!r} of shape {tuple(tensor.shape)}, and this model's "
                f"parameter has {tuple(parameter.shape)}"
            )
        device = "cpu" if kind == "step" else parameter.device
        found.setdefault(name, {})[kind] = tensor.to(device, copy=True)
    torn = next((name for name, state in found.items() if len(state) != len(KINDS)), "")
    if torn:
        raise ForeignError(f"its optimizer lacks a part of the state of {torn!r}")
    optimizer.state.clear()
    for name, state in found.items():
        optimizer.state[parameters[name]] = state
