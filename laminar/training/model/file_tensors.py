"""The tensors of a model as those of its files: other names, and one tensor for each expert.

Reads   a model in memory or on the meta device; the names in its files
Gives   `find_file_parts`, `note_file_prefix`, `iter_file_rows`, `group_tied`

Engines, exports and checkpoints have the names of the files. transformers stacks experts as it
loads them: row n of the first dimension is expert n, and gate and up follow each other along the
second. A rank has some of these rows, and so a few experts whole and none of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from laminar.config.families import TEXT_PREFIX, find_text_prefix, get_family
from laminar.training.model import lora
from laminar.training.model.lora_targets import EXPERT_NUMBER
from laminar.training.shared_safetensors import Rows, rows_of

_PREFIX, _PARTS = "_laminar_file_prefix", "_laminar_file_parts"
"""Attributes of a model: what was found when it was built, before it was sharded or adapted."""


class FilePart(NamedTuple):
    """A tensor of the files: a whole tensor of the model, or rows of one expert in it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first: int = 0  #: row of the expert


FileParts = Mapping[str, tuple[FilePart, ...]]
"""Parts by a tensor's name in the model."""


def note_file_prefix(model: PreTrainedModel, names: Mapping[str, Any]) -> None:
    """Note where the language model is in files with these tensors."""
    model.__dict__[_PREFIX] = find_text_prefix(get_family(model.config.model_type), names)
    model.__dict__.pop(_PARTS, None)


def find_file_parts(model: PreTrainedModel) -> FileParts:
    """Return the parts of all tensors, adapters excepted."""
    if (known := model.__dict__.get(_PARTS)) is not None:
        return known  # type: ignore[no-any-return]
    tensors = lora.base_tensors(model.state_dict(keep_vars=True))
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    converted = [each for each in conversions if not isinstance(each, PrefixChange)]
    prefix = model.__dict__.get(_PREFIX, TEXT_PREFIX)
    found = {}
    for name, tensor in tensors.items():
        saved = {name: torch.empty(tensor.shape, device="meta")}
        if converted:
            model.__dict__["_weight_conversions"] = converted  # else looked up for each tensor
            saved = revert_weight_conversion(model, saved)
        renamed = {_replace_prefix(key, prefix): tuple(t.shape) for key, t in saved.items()}
        found[name] = _find_parts(renamed)
    model.__dict__[_PARTS] = found
    return found


def _replace_prefix(name: str, prefix: str) -> str:
    return prefix + name.removeprefix(TEXT_PREFIX) if name.startswith(TEXT_PREFIX) else name


def _find_parts(saved: Mapping[str, tuple[int, ...]]) -> tuple[FilePart, ...]:
    """Return the parts of one tensor from the names and shapes that it has in the files."""
    if len(saved) == 1:
        return tuple(FilePart(name, shape) for name, shape in saved.items())
    parts, rows = [], dict[str, int]()
    for name, shape in saved.items():
        (number,) = EXPERT_NUMBER.findall(name)
        parts.append(FilePart(name, shape, int(number), rows.get(number, 0)))
        rows[number] = rows.get(number, 0) + shape[0]
    return tuple(parts)


def iter_file_rows(parts: Iterable[FilePart], tensor: Tensor) -> Iterator[tuple[str, Rows]]:
    """Yield this rank's rows of a model's tensor, not copied, by name in the files."""
    rows = rows_of(tensor)
    for part in parts:
        if part.expert is None:
            yield part.name, rows
            continue
        at = part.expert - rows.first
        there = 0 <= at < len(rows.data)
        data = rows.data[at] if there else rows.data.new_empty(0, *part.shape[1:])
        yield part.name, Rows(part.shape, 0, data[part.first : part.first + part.shape[0]])


def by_identity(tensors: Mapping[str, Tensor]) -> dict[int, tuple[list[str], Tensor]]:
    """Group names by tensor; by id, because a sharded tensor has no address to compare."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return found


def group_tied(model: PreTrainedModel) -> Iterable[tuple[list[str], Tensor]]:
    """Return the model's tensors without adapters, each with all of its names in the model."""
    return by_identity(lora.base_tensors(model.state_dict(keep_vars=True))).values()
