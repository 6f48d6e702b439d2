"""The policy: a Hugging Face causal LM in float32, its log-probs, its weights by name.

Reads   a model directory (safetensors only)
Gives   LoadedPolicy; BasePolicy, the same without its adapters (lora.py); ConfigError for a
        checkpoint that does not fill the model exactly, and for a model that changes the logits
        of its head

Logits of a whole micro-batch would be the largest tensors of a step: 16,384 tokens of a vocabulary
of 151,936 are 10 GB, four times over. So head and softmax run over chunks of tokens. With several
chunks, each keeps its hidden states only, and the backward pass recomputes its logits.

transformers only warns about a tensor that it did not find and initializes it at random; a training
run that starts from such weights looks healthy for hours. So missing and unexpected tensors are an
error. Trained weights are always float32: an update of 1e-6 is lost in a bfloat16 weight. A frozen
base under adapters may have the compute type. The model stays in evaluation mode even in training,
because dropout would make the trainer's log-probs differ from the engine's; gradients do not depend
on that mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from laminar.config import Config, ConfigError
from laminar.config.families import get_family
from laminar.training.algorithms.loss_terms import entropy_of, gather_targets, log_softmax_at
from laminar.training.model import lora
from laminar.training.model.experts import cast_experts
from laminar.training.model.file_tensors import find_file_parts, group_tied, iter_file_rows
from laminar.training.model.footprint import FLOAT32, way_of
from laminar.training.model.loading import CPU, build_meta_model, fill_model
from laminar.training.model.micro_batches import TokenRows, pad_token_rows
from laminar.training.model.shared_prefix_attention import find_padding_reason, read_prompts_once
from laminar.training.model.weight_files import (
    HEAD,
    VALUE_HEAD,
    check_published_names,
    check_unused_tensors,
)
from laminar.training.shared_safetensors import Rows, TensorLayout, TensorLayouts
from laminar.training.steps import ModelLayout

Entropy = Literal["none", "value", "gradient"]
CHECKED_TOKENS = 16
HEAD_TOLERANCE = 1e-3
"""Nats. Float32 rounding is 1e-5; an effective scale or cap changes tenths and more."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Precision and chunk size of a pass through a model."""

    dtype: torch.dtype  #: type of the matrix products
    chunk_tokens: int  #: scored tokens whose logits are live at a time


class TokenScores(NamedTuple):
    log_probs: Tensor  #: [tokens] float32
    entropy: Tensor  #: [tokens] float32; [0] if not requested


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    model: PreTrainedModel
    vocab_limit: int  #: first id that the logits have and the tokenizer lacks: never sampled
    prompts_once: bool = False  #: whether attention is that of shared_prefix_attention.py
    base: str = ""  #: digest of the frozen weights; empty: all are trained

    @property
    def device(self) -> torch.device:
        return self.model.device

    def reads_prompts_once(self, compute: Compute) -> bool:
        return self.prompts_once and not find_padding_reason(self.model, self.device, compute.dtype)

    def describe_layout(self, published: TensorLayouts, compute: Compute) -> ModelLayout:
        """Describe the published tensors, and how the sequences of a step are read."""
        shapes = tuple((name, form.shape) for name, form in published.items())
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        padded = find_padding_reason(self.model, self.device, compute.dtype)
        return ModelLayout(shapes, dtype, f"padded: {padded}" if padded else "prompts once")

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole of one of the policy's tensors."""
        return tensor

    def cast_weights(self, dtype: torch.dtype) -> None:
        """Cast weights as autocast would in each pass; for a model that is not trained."""
        cast_linear(self.model, dtype)

    def log_probs(
        self, rows: TokenRows, temperature: Tensor, compute: Compute, entropy: Entropy = "none"
    ) -> TokenScores:
        """Return log-probs of the rows' targets, and entropies, at `temperature` [tokens].

        The entropy, over the whole vocabulary, has a gradient only if requested.
        """
        hidden = self._compute_hidden(rows, compute)
        head = partial(
            _head_scores,
            head=self.model.get_output_embeddings(),
            limit=self.vocab_limit,
            dtype=compute.dtype,
            entropy=entropy,
            cap=get_logit_cap(self.model),
        )
        tensors = (hidden, rows.targets, temperature)
        if len(rows.targets) <= compute.chunk_tokens:
            return TokenScores(*head(*tensors))
        chunks = zip(*(tensor.split(compute.chunk_tokens) for tensor in tensors), strict=True)
        parts = [
            checkpoint(head, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
        return TokenScores(*map(torch.cat, zip(*parts, strict=True)))

    def run_backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a pass; `last`: no other pass is added before the update."""
        torch.autograd.backward(loss)

    def values(self, rows: TokenRows, compute: Compute) -> Tensor:
        """Return a critic's values [tokens] float32 of the states that predict the rows' targets.

        The head is small enough to compute in the type of its weights.
        """
        model: Any = self.model
        hidden = self._compute_hidden(rows, compute).to(model.score.weight.dtype)
        values: Tensor = model.score(hidden)[:, 0]
        return values

    def _compute_hidden(self, rows: TokenRows, compute: Compute) -> Tensor:
        """Return the hidden states [tokens, width] at the positions that predict the targets."""
        with _make_autocast(self.device, compute.dtype):
            output = self.model.base_model(
                input_ids=rows.input_ids, use_cache=False, **self._build_row_arguments(rows)
            )
        hidden: Tensor = output.last_hidden_state.flatten(0, 1)
        return hidden.index_select(0, rows.index)

    def _build_row_arguments(self, rows: TokenRows) -> dict[str, Any]:
        """Return the extra arguments of the model for rows that are not padded."""
        if not rows.prompts:
            return {}
        if not self.prompts_once:  # its attention would read the row as one sequence
            raise ValueError("this model cannot read rows with shared prompts")
        return {"position_ids": rows.positions, "prompts": rows.prompts}


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """A policy with its adapters switched off: its base, without a second model."""

    policy: LoadedPolicy

    @property
    def base(self) -> str:
        return self.policy.base

    def cast_weights(self, dtype: torch.dtype) -> None:
        """Do nothing: the weights are shared with the policy."""

    def log_probs(
        self, rows: TokenRows, temperature: Tensor, compute: Compute, entropy: Entropy = "none"
    ) -> TokenScores:
        with lora.disable_adapters(self.policy.model):
            return self.policy.log_probs(rows, temperature, compute, entropy)


def _head_scores(
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    head: nn.Module,
    limit: int,
    dtype: torch.dtype,
    entropy: Entropy,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of one chunk from its hidden states [tokens, width].

    Ids from `limit` on are dropped, which equals an engine's masking to -inf. Each chunk casts the
    weight separately: gradients of a shared cast would be summed in the compute type.
    """
    with _make_autocast(hidden.device, dtype):
        logits = head(hidden)[:, :limit]
    if cap:
        logits = cap * torch.tanh(logits.float() / cap)
    vocabulary = log_softmax_at(logits, temperature)
    log_probs = gather_targets(vocabulary, targets)
    if entropy == "none":
        return log_probs, log_probs.new_empty(0)
    return log_probs, entropy_of(vocabulary if entropy == "gradient" else vocabulary.detach())


def get_logit_cap(model: PreTrainedModel) -> float:
    """Return the limit of the model's logits; 0: there is none."""
    field = get_family(model.config.model_type).logit_cap
    return (getattr(model.config, field) if field else 0.0) or 0.0


def _make_autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return an autocast without its cache, which would hold all layers' casts through the pass."""
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def cast_linear(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the linear layers of a model that is not trained, as autocast would in each pass.

    Scores stay bit-identical: embeddings and norms, which autocast does not touch, keep their type,
    and so does a head that is the embedding.
    """
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embedded:
            module.to(dtype)


def recompute_layers(model: nn.Module) -> None:
    """Have each layer keep its input only, and recompute the rest in the backward pass.

    transformers' own checkpointing does nothing in evaluation mode, and torch's wrapper around a
    layer renames its parameters, whose names are the keys of the moments in checkpoints.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.activation_checkpointing: a {type(model).__name__} has no layers of type "
            "GradientCheckpointingLayer (transformers); set it to off"
        )
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def load_critic(name: str, device: torch.device | str, *, tokenizer_size: int) -> LoadedPolicy:
    """Load the layers of `name` in float32 with a new value head of zeros; raises ConfigError.

    The language model's head is left out."""
    model = build_critic_model(name)
    fill_model(name, model, CPU, but=(HEAD, VALUE_HEAD))
    model.to(device)  # type: ignore[arg-type]
    return build_critic(model, tokenizer_size, device=model.device)


def build_critic_model(name: str) -> PreTrainedModel:
    """Build the layers of `name` with a value head, without memory; raises ConfigError.

    transformers gives some families such a head for whole sequences only, but computes it for
    every token alike."""
    for kind in (AutoModelForTokenClassification, AutoModelForSequenceClassification):
        with suppress(ConfigError):
            model = build_meta_model(name, kind, num_labels=1)
            break
    else:
        model = build_meta_model(name)
    check_value_head(name, model)
    return model


def check_value_head(name: str, model: PreTrainedModel) -> None:
    if not hasattr(model, "score"):
        raise ConfigError(
            f"model {name!r} cannot be a critic: a {type(model).__name__} has no head named "
            "score; use a decoder such as Qwen2, Qwen3 or Llama"
        )


@torch.no_grad()
def build_critic(model: Any, vocab_limit: int, *, device: torch.device) -> LoadedPolicy:
    """Make a critic whose values are 0 from a model for token classification with one label."""
    for parameter in model.score.parameters():
        parameter.zero_()
    if once := not find_padding_reason(model, device):
        read_prompts_once(model)
    return LoadedPolicy(model.eval(), vocab_limit, once)


def load_policy(
    name: str, device: torch.device | str, *, tokenizer_size: int, adapt: Config | None = None
) -> LoadedPolicy:
    """Load `name` in float32 for scoring and training; raises ConfigError.

    `tokenizer_size` is one more than the tokenizer's largest id; models pad their vocabulary.
    `adapt`: the run whose adapters the model gets. They are added before the model moves to the
    device, which may lack the memory for float32 weights.
    """
    model = build_meta_model(name)
    fill_model(name, model, CPU)
    limit = min(model.get_output_embeddings().weight.shape[0], tokenizer_size)
    device, base = torch.device(device), ""
    if adapt is not None:
        before = LoadedPolicy(model.eval(), limit)
        check_head(name, before)
        base = digest_base_weights(before)
        _add_adapters(model, adapt, device)
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of it loses `self`
    once = not find_padding_reason(model, model.device)
    if once:
        read_prompts_once(model)
    policy = LoadedPolicy(model.eval(), limit, once, base)
    if adapt is None:
        check_head(name, policy)
    return policy


def _add_adapters(model: PreTrainedModel, config: Config, device: torch.device) -> None:
    if way_of(config, gpu=device.type == "cuda").base < FLOAT32:
        cast_linear(model, torch.bfloat16)
        cast_experts(model, torch.bfloat16)
    lora.inject_adapters(model, config.lora)
    lora.initialize_adapters(model, config.seed)


def check_files(config: Config) -> None:
    """Check before a run that the files fill the model and the critic; raises ConfigError.

    Only headers and a few rows are read.
    """
    name = config.model.name
    model = build_meta_model(name)
    if config.lora.rank:
        lora.inject_adapters(model, config.lora)
    check_published_names(name, model)
    check_unused_tensors(name, model)
    if config.has_critic:
        critic = build_critic_model(config.critic_name)
        check_unused_tensors(config.critic_name, critic)


@torch.no_grad()
def check_head(name: str, policy: LoadedPolicy) -> None:
    """Compare the log-probs of one row with the model's logits, which it may scale or cap."""
    ids = np.arange(CHECKED_TOKENS, dtype=np.int32) % policy.vocab_limit
    rows = pad_token_rows([ids], [1], policy.device)
    temperature = torch.ones(len(rows.targets), device=policy.device)
    found = policy.log_probs(rows, temperature, Compute(torch.float32, CHECKED_TOKENS // 3))
    logits = policy.model(input_ids=rows.input_ids, use_cache=False).logits
    own = log_softmax_at(logits[0, :-1, : policy.vocab_limit], temperature)
    apart = float((gather_targets(own, rows.targets) - found.log_probs).abs().max())
    if not apart <= HEAD_TOLERANCE:
        raise ConfigError(
            f"model {name!r} is a {type(policy.model).__name__}, which scales or caps the output "
            f"of its head (log-probs differ by {apart:.1g}); use a causal LM that returns it "
            "unchanged, such as Qwen2, Qwen3 or Llama"
        )


def iter_weight_rows(model: PreTrainedModel) -> Iterator[tuple[str, Rows]]:
    """Yield this rank's rows of every tensor under its name in the files, without gradients.

    Tied tensors come once, under the first name: a model with a tied head has no lm_head.weight.
    Without adapters the rows are the model's own; with adapters each tensor is merged in float32
    when it is requested, which is a collective call if the model is sharded.
    """
    layers, parts = lora.find_adapted_layers(model), find_file_parts(model)
    for name, tensor in get_base_weights(model).items():
        layer = layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is not None:
            tensor = lora.merge_adapter(layer)
        elif layers:
            tensor = tensor.to(lora.trained_type(tensor.dtype))
        yield from iter_file_rows(parts[name], tensor)


def get_base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the model as loaded, without merging or other computation."""
    return {names[0]: tensor.detach() for names, tensor in group_tied(model)}


def get_base_rows(model: PreTrainedModel) -> dict[str, Rows]:
    """Return this rank's rows of the same tensors, by name in the files."""
    parts, tensors = find_file_parts(model), get_base_weights(model).items()
    return {key: r for name, t in tensors for key, r in iter_file_rows(parts[name], t)}


def weight_forms(model: PreTrainedModel) -> TensorLayouts:
    """Return the shapes and types of what `iter_weight_rows` yields."""
    adapted = bool(lora.find_adapted_layers(model))
    return {
        name: TensorLayout(
            rows.shape, lora.trained_type(rows.data.dtype) if adapted else rows.data.dtype
        )
        for name, rows in get_base_rows(model).items()
    }


def digest_base_weights(policy: LoadedPolicy) -> str:
    """Return the digest of all weights without adapters: names, types, shapes and bytes."""
    found = xxhash.xxh3_128()
    for name, tensor in get_base_weights(policy.model).items():
        tensor = policy.gather_tensor(tensor)
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
