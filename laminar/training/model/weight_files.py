"""The tensors of a model, compared with those of its weight files.

Reads   weight files of a model's directory, by slices; their headers alone before a run
Raises  ConfigError

transformers renames, fuses and transposes some tensors as it loads them, and ignores others. What
is trained under another name, or with other values, reaches engines and exports that way. So a new
run publishes nothing before every tensor is found in the files, with its values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from laminar.config import ConfigError
from laminar.config.families import select_text_tensors
from laminar.training.model.file_tensors import FilePart, find_file_parts, group_tied
from laminar.training.shared_safetensors import DTYPES, Rows

HEAD, VALUE_HEAD = "lm_head.", "score."
"""Name prefixes of the heads of a policy and of a critic in transformers."""
SUPPORTED = "use a model of a family in docs/models.md, or correct its files"
COMPARED_ROWS = 64


def check_loaded(name: str, missing: Iterable[str], unused: Iterable[str]) -> None:
    """Require that the checkpoint has every tensor of the model and no others."""
    for keys, what in (
        (missing, "lacks tensors of the model"),
        (unused, "has tensors that the model does not use"),
    ):
        if found := sorted(keys):
            raise ConfigError(
                f"the checkpoint of {name!r} {what}: {', '.join(found[:5])} ({len(found)} in all);"
                " its weights and config.json must match"
            )


def check_published_names(name: str, model: PreTrainedModel) -> None:
    """Require every tensor that will be published in the model's files, by name and shape.

    Engines and other programs expect the names of the files, and may ignore others.
    """
    with ExitStack() as files:
        slices = open_slices(Path(name), files).items()
        saved = {key: tuple(found.get_shape()) for key, found in slices}
    other = [
        f"{part.name} {part.shape}"
        for part, names, _ in _list_published(model)
        if not any(saved.get(key) == part.shape for key in names)
    ]
    if other:
        raise ConfigError(
            f"model {name!r} is a {type(model).__name__}, and its files lack tensors of these "
            f"names and shapes: {', '.join(other[:3])} ({len(other)} in all); engines could not "
            f"load what is trained; {SUPPORTED}"
        )


def _list_published(model: PreTrainedModel) -> Iterator[tuple[FilePart, list[str], torch.dtype]]:
    """Yield what is published, the names that it may have in the files, and its type here."""
    parts = find_file_parts(model)
    for names, tensor in group_tied(model):
        for number, part in enumerate(parts[names[0]]):
            yield part, [parts[each][number].name for each in names], tensor.dtype


@torch.no_grad()
def compare_published(
    name: str, model: PreTrainedModel, published: Iterable[tuple[str, Rows]], dtype: str | None
) -> int:
    """Require that the files have all that is published, and nothing else; return its tensors.

    `published`: this rank's rows by name. `dtype`: the published type, in which values are
    compared; None: names and shapes are. All rows are taken before an error is raised: to merge
    adapters may be a collective call.
    """
    tied = {part.name: (names, held) for part, names, held in _list_published(model)}
    differences = list[str]()
    with ExitStack() as files:
        saved = open_slices(Path(name), files)
        for key, rows in published:
            names, held = tied.get(key, ([key], rows.data.dtype))
            slices = [saved.pop(each) for each in names if each in saved]
            reasons = [_find_difference(rows, each, held, dtype) for each in slices]
            reasons = reasons or ["is not in the files"]
            differences += [f"{key} {reason}" for reason in reasons if reason]
        unused = list_unused(model, saved)
    differences += [f"{key} of the files is not published" for key in unused]
    if differences:
        kind = type(model).__name__.removeprefix("FSDP")
        raise ConfigError(
            f"model {name!r} is a {kind}, and what it publishes differs from its "
            f"files: {', '.join(differences[:3])} ({len(differences)} in all); engines and "
            f"exports would not get what is trained; {SUPPORTED}"
        )
    return len(tied)


def _find_difference(
    rows: Rows, saved: Any, held: torch.dtype, published: str | None
) -> str | None:
    """Return how these rows differ from a slice of the files; `held`: type of the base weights."""
    if (packed := saved.get_dtype()) not in DTYPES.values():
        return f"has the packed type {packed} in the files"
    if (shape := tuple(saved.get_shape())) != rows.shape:
        return f"has the shape {rows.shape}, and {shape} in the files"
    if published is None or not rows.data.numel():
        return None
    dtype = getattr(torch, published)
    expected = saved[rows.first : rows.first + len(rows.data)] if shape else saved[...]
    own, expected = rows.data.to(dtype).cpu(), expected.to(held).to(dtype)
    if torch.equal(own, expected):
        return None
    if own.shape != expected.shape:
        return f"has rows of the shape {tuple(own.shape)}, not {tuple(expected.shape)}"
    other = (own != expected).reshape(own.shape[0] if shape else 1, -1).any(1)
    first = int(other.nonzero()[0])
    return f"has other values, from row {rows.first + first} on"


def check_unused_tensors(name: str, model: PreTrainedModel) -> None:
    """Refuse tensors that transformers would not use, and a second head of a tied model."""
    with ExitStack() as files:
        saved = open_slices(Path(name), files)
        for _, names, _ in _list_published(model):
            tied = [(key, saved.pop(key)) for key in names if key in saved]
            if len(tied) > 1 and not _have_equal_rows(tied[0][1], tied[1][1]):
                raise ConfigError(
                    f"model {name!r}: config.json ties {tied[1][0]} to {tied[0][0]} "
                    "(tie_word_embeddings), but the weight files have different values for them; "
                    f"set tie_word_embeddings to false, or remove {tied[1][0]} from the files"
                )
    head = HEAD if not model.can_generate() else ()  # a critic ignores that of the policy
    check_loaded(name, (), [key for key in list_unused(model, saved) if not key.startswith(head)])


def list_unused(model: PreTrainedModel, saved: Mapping[str, Any]) -> list[str]:
    """Return those names that the model neither uses nor is known to ignore."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    known = select_text_tensors(model.config.model_type, saved)
    return [key for key in known if not any(re.search(pattern, key) for pattern in ignored)]


def _have_equal_rows(one: Any, other: Any) -> bool:
    """Whether two slices have the same shape, and the same first and last rows."""
    if one.get_shape() != other.get_shape():
        return False
    parts = (slice(COMPARED_ROWS), slice(max(0, one.get_shape()[0] - COMPARED_ROWS), None))
    return all(torch.equal(one[part], other[part]) for part in parts)


def open_slices(directory: Path, files: ExitStack) -> dict[str, Any]:
    """Open all weight files; return by name a slice, which reads rows without the rest."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, Any] = {}
    for name in names:
        file = files.enter_context(safe_open(directory / name, framework="pt"))
        found |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    return found
