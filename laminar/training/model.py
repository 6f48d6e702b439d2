"""The policy: a Hugging Face causal LM in float32, its forward pass, its weights by name.

Reads   a model directory (safetensors only)
Gives   LoadedPolicy; ConfigError for a checkpoint that does not fill the model exactly

transformers warns about a tensor it did not find and goes on with random numbers; a training run
that starts from those looks healthy for hours. So missing and unexpected tensors refuse to load.
Parameters are always float32: an update of 1e-6 is lost in a bfloat16 weight. The model stays in
evaluation mode, also in training, because dropout would make the trainer's log-probs differ from
the engine's; gradients do not depend on that mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from laminar.config import ConfigError
from laminar.training.batching import TokenRows


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    model: PreTrainedModel
    vocab_limit: int  #: ids from here on are in the logits but not in the tokenizer: never sampled

    @property
    def device(self) -> torch.device:
        return self.model.device

    def logits(self, rows: TokenRows, compute_dtype: torch.dtype) -> Tensor:
        """Logits [tokens, vocab_limit] that predict the rows' targets.

        Dropping the ids from `vocab_limit` on is what an engine does that masks them to -inf.
        """
        autocast = compute_dtype != torch.float32
        with torch.autocast(self.device.type, dtype=compute_dtype, enabled=autocast):
            output = self.model(input_ids=rows.input_ids, use_cache=False, logits_to_keep=rows.keep)
        logits: Tensor = output.logits
        return logits.flatten(0, 1).index_select(0, rows.index)[:, : self.vocab_limit]


def load_policy(name: str, device: torch.device | str, *, tokenizer_size: int) -> LoadedPolicy:
    """Load `name` in float32 for scoring and training; raises ConfigError.

    `tokenizer_size` is one more than the tokenizer's largest id; models pad their vocabulary.
    """
    model, info = _from_pretrained(name)
    _check_loaded(name, info)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"model {name!r} is a {type(model).__name__}, whose forward has no logits_to_keep; "
            "use a causal LM of transformers that has it"
        )
    width = model.get_output_embeddings().weight.shape[0]
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of it loses `self`
    return LoadedPolicy(model.eval(), min(width, tokenizer_size))


def _from_pretrained(name: str) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model and what its loading left out or over."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {name!r} cannot be loaded: {reason}; give model.name the directory "
            "of a causal LM with safetensors weights"
        ) from error
    model, info = loaded
    return model, info


def _check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Every tensor of the model from the checkpoint, and none left over."""
    for kind, what in (
        ("missing_keys", "lacks tensors of the model"),
        ("unexpected_keys", "has tensors that the model does not use"),
    ):
        found = sorted(map(str, info[kind]))
        if found:
            raise ConfigError(
                f"the checkpoint of {name!r} {what}: {', '.join(found[:5])} ({len(found)} in all);"
                " its weights and config.json must belong together"
            )


def named_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Every tensor of the checkpoint under its Hugging Face name, without gradients, not copied.

    Tied tensors come once, under the first name: a model with a tied head has no lm_head.weight.
    """
    seen: set[tuple[int, torch.Size]] = set()
    found = []
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tensor.shape)
        if identity not in seen:
            seen.add(identity)
            found.append((name, tensor))
    return found
