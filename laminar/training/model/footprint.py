"""Memory footprint of training, on the device and on the host, computed from shapes alone.

Reads   config.json and the shapes of the weights, the settings
Gives   Footprint: bytes by kind, those of the device at the peak of a pass

Pure, and without torch: the command line and the trainer ask for it before anything starts, and
the trainer reports it next to the measured value. State is exact. The bytes of a pass are sums
over the tensors that transformers' decoder layers keep for the backward pass and that the head
works with; tests compare them with real layers. Not counted: CUDA's own memory, fragmentation and
the workspace of kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from laminar.config import Config
from laminar.config.families import select_text_tensors
from laminar.training.model.lora_targets import ALL_LINEAR, EXPERT_NUMBER, LAYER_PATTERN
from laminar.training.model.lora_targets import sum_matrix_sizes as matrices_of

FLOAT32 = 4  #: bytes of each parameter, gradient and moment
BYTES = {"float32": 4, "bfloat16": 2}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
NORMS = 2  #: norms of a layer, over the hidden size
LOGIT_BUFFERS, LOGIT_BUFFERS_WITH_BONUS = 4, 5
"""Live [tokens of a chunk, vocabulary] float32 tensors, at most; an entropy bonus adds one, because
the entropy is differentiated too."""
HEAD_SUMS = 3  #: live gradients of a head while two of them are added: both, and their sum

Shapes = Mapping[str, tuple[int, ...]]
Offload = Literal["none", "all"]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Figures that determine the bytes of a model; 0 where config.json gives none."""

    parameters: int  #: a tied head counts once, as the embedding
    layers: int
    hidden: int
    inner: int  #: width of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  #: whether the head is the embedding
    qk_norm: bool
    products: int  #: parameters of the matrices of all layers
    biases: int  #: parameters of the biases of those matrices
    largest_layer: int  #: parameters
    largest_matrix: int  #: parameters of the largest matrix of a layer
    matrices: Mapping[str, int]  #: by name, such as q_proj: inputs plus outputs, summed over layers
    shapes: tuple[tuple[int, ...], ...]  #: of all tensors that `parameters` counts


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Settings that decide how a model is trained."""

    tokens: int  #: tokens of the largest pass, padding included
    chunk_tokens: int
    compute: int  #: bytes of a number in matrix products
    recomputes: bool  #: whether activation checkpointing is on
    entropy_bonus: bool
    reference: bool
    copies: bool  #: whether host copies are made for checkpoints
    published: int  #: bytes of a number in the published weights
    critic: ModelSizes | None = None  #: its head gives one number
    ranks: int = 1  #: ranks that the model is divided among
    nodes: int = 1  #: machines of these ranks
    groups: int = 1  #: groups of such ranks, each with the whole model
    offload: Offload = "none"
    rank: int = 0  #: rank of the adapters; 0: the model itself is trained
    modules: tuple[str, ...] = ()  #: modules that have adapters
    gpu: bool = False  #: whether host copies are pinned for transfers

    @property
    def base(self) -> int:
        """Bytes of a number in the matrices of a frozen base.

        The compute type, or the published type if that is wider. FSDP2 takes one type per layer."""
        return FLOAT32 if self.sharded else max(self.compute, self.published)

    @property
    def sharded(self) -> bool:
        return self.ranks * self.groups > 1 or self.offload != "none"


@dataclass(frozen=True, slots=True)
class Footprint:
    device: dict[str, int] = field(default_factory=dict)  #: on each rank's GPU, or in its process
    host: dict[str, int] = field(default_factory=dict)  #: all ranks of a machine together


def sizes_of(hf_config: Mapping[str, Any], shapes: Shapes) -> ModelSizes:
    """Return the sizes of a model; `shapes`: of all tensors, by name as in the weight files."""
    tied = bool(hf_config.get("tie_word_embeddings")) or HEAD not in shapes
    trained = select_text_tensors(hf_config.get("model_type"), shapes)
    own = {name: shape for name, shape in trained.items() if not (tied and name == HEAD)}
    layers: dict[str, int] = {}
    by_matrix: dict[str, int] = {}
    for name, shape in own.items():
        if found := LAYER_PATTERN.search(name):
            layers[found[1]] = layers.get(found[1], 0) + math.prod(shape)
            if len(shape) > 1:  # experts are one matrix in the model
                stacked = EXPERT_NUMBER.sub("", name)
                by_matrix[stacked] = by_matrix.get(stacked, 0) + math.prod(shape)
    matrices = by_matrix.values()
    embedding = next((s for name, s in own.items() if name.endswith(EMBEDDING)), (0, 0))
    heads = hf_config.get("num_attention_heads") or 0
    return ModelSizes(
        parameters=sum(map(math.prod, own.values())),
        layers=len(layers),
        hidden=embedding[1],
        inner=_get_inner_width(hf_config),
        heads=heads,
        kv_heads=hf_config.get("num_key_value_heads") or heads,
        head_dim=hf_config.get("head_dim") or (embedding[1] // heads if heads else 0),
        vocabulary=embedding[0],
        tied=tied,
        qk_norm=any(name.endswith("q_norm.weight") for name in own),
        products=sum(matrices),
        biases=sum(math.prod(s) for name, s in own.items() if name.endswith(".bias")),
        largest_layer=max(layers.values(), default=0),
        largest_matrix=max(matrices, default=0),
        matrices=matrices_of(own),
        shapes=tuple(own.values()),
    )


def _get_inner_width(hf_config: Mapping[str, Any]) -> int:
    """Return the width of the MLP, or the sum over the experts that compute one token."""
    width = hf_config.get("intermediate_size") or 0
    chosen = hf_config.get("num_experts_per_tok") or 0
    return max(width, chosen * (hf_config.get("moe_intermediate_size") or width))


def way_of(config: Config, *, gpu: bool, critic: ModelSizes | None = None) -> TrainingPlan:
    """Derive the training plan from the settings; `critic`: sizes of its initial model."""
    trainer, algorithm = config.trainer, config.algorithm
    automatic = "bfloat16" if gpu else "float32"
    types = (trainer.dtype, config.weights.dtype)
    compute, published = (automatic if name == "auto" else name for name in types)
    recomputes = {"auto": gpu, "on": True, "off": False}[trainer.activation_checkpointing]
    return TrainingPlan(
        tokens=pass_tokens(config),
        chunk_tokens=trainer.logit_chunk_tokens,
        compute=BYTES[compute],
        recomputes=recomputes,
        entropy_bonus=bool(algorithm.entropy_coeff),
        reference=algorithm.use_kl_loss,
        copies=bool(trainer.save_freq),
        published=BYTES[published],
        critic=critic,
        ranks=trainer.total_ranks if trainer.shard == "all" else trainer.ranks,
        nodes=trainer.nodes if trainer.shard == "all" else 1,
        groups=1 if trainer.shard == "all" else trainer.nodes,
        offload=trainer.offload,
        rank=config.lora.rank,
        modules=tuple(config.lora.target_modules),
        gpu=gpu,
    )


def longest_row(config: Config) -> int:
    """Return the tokens of the longest sequence, which is never split."""
    return config.data.max_prompt_length + config.data.max_response_length


def pass_tokens(config: Config) -> int:
    """Return the tokens of the largest pass of a rank.

    That is the budget, but at least one whole row and at most the rank's rows."""
    row = longest_row(config)
    rows = -(-config.mini_batch_groups * config.rollout.group_size // config.trainer.total_ranks)
    return min(max(config.trainer.micro_batch_tokens, row), rows * row)


def estimate_footprint(model: ModelSizes, way: TrainingPlan) -> Footprint:
    """Estimate the memory at the peak of a pass."""
    trained = _count_adapter_parameters(model, way) if way.rank else model.parameters
    critic = _replace_head(way.critic) if way.critic is not None else None
    state = _state_bytes(model, critic, way, trained)
    device, host = {name: -(-size // way.ranks) for name, size in state.items()}, {}
    if way.offload == "all":
        device, host = {}, {f"{n}, offloaded": -(-size // way.nodes) for n, size in state.items()}
    if way.sharded:
        gathered = _gathered_bytes(model, way)
        if way.critic is not None:  # in turn with the policy; its head is one row
            of_critic = replace(way.critic, tied=True)
            gathered = max(gathered, _gathered_bytes(of_critic, replace(way, rank=0)))
        device["gathered layers"] = gathered
    if way.copies:
        copied = model.parameters + 2 * trained + (trained if way.rank else 0)
        copies = _copied_bytes(model, copied, way)
        if critic is not None:
            copies += _copied_bytes(critic, 3 * critic.parameters, way)
        host["checkpoint copies"] = -(-copies // way.nodes)
        host["a version for its digest"] = way.published * model.parameters
    taken = _pass_bytes(model, way)
    if critic is not None:  # it has no adapters
        taken = max(taken, _pass_bytes(critic, replace(way, rank=0)), key=sum_bytes)
    return Footprint(_drop_zeros(device | taken), _drop_zeros(host))


def _copied_bytes(model: ModelSizes, parameters: int, way: TrainingPlan) -> int:
    """Return the bytes of float32 copies in host memory, which belong to tensors like the model's.

    torch rounds each pinned block up to a power of two; a block holds the rows of one rank."""
    if not way.gpu or way.offload != "none":
        return FLOAT32 * parameters
    exact = rounded = 0
    for (rows, *others), count in Counter(shape or (1,) for shape in model.shapes).items():
        per_rank = -(-rows // way.ranks)
        for first in range(0, rows, max(per_rank, 1)):
            size = FLOAT32 * min(per_rank, rows - first) * math.prod(others)
            exact += count * size
            rounded += count << (size - 1).bit_length() if size else 0
    return FLOAT32 * parameters * rounded // max(exact, 1)


def _state_bytes(
    model: ModelSizes, critic: ModelSizes | None, way: TrainingPlan, trained: int
) -> dict[str, int]:
    """Return the bytes held between two passes; `trained`: trained parameters of the policy."""
    state = {"gradients": FLOAT32 * trained, "Adam's moments": 2 * FLOAT32 * trained}
    if way.rank:  # the reference is the base
        state = {"base": _held_bytes(model, way), "adapters": FLOAT32 * trained} | state
    else:
        state = {"parameters": FLOAT32 * model.parameters} | state
        if way.reference:
            state["reference model"] = _held_bytes(model, way)
    if critic is not None:  # its gradients are live when the policy's are not
        state["critic and its moments"] = 3 * FLOAT32 * critic.parameters
        state["gradients"] = FLOAT32 * max(trained, critic.parameters)
    return state


def _replace_head(model: ModelSizes) -> ModelSizes:
    """Return the sizes as a critic: its head is one row, which gives one number for each token."""
    head = 0 if model.tied else model.vocabulary * model.hidden
    parameters = model.parameters - head + model.hidden + 1
    return replace(model, parameters=parameters, vocabulary=1, tied=False)


def _count_adapter_parameters(model: ModelSizes, way: TrainingPlan) -> int:
    """Count the parameters of the adapters of all layers."""
    return way.rank * sum(model.matrices.get(name, 0) for name in _get_adapter_modules(model, way))


def _get_adapter_modules(model: ModelSizes, way: TrainingPlan) -> Collection[str]:
    return model.matrices if ALL_LINEAR in way.modules else way.modules


def sum_bytes(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _drop_zeros(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _held_bytes(model: ModelSizes, way: TrainingPlan) -> int:
    """Return the bytes of a model that is not trained.

    Linear layers have the compute type; the embedding (a tied head too) and norms stay float32.
    Sharded over ranks, everything is float32."""
    linear = model.products + model.biases
    linear += 0 if model.tied else model.vocabulary * model.hidden
    size = way.base if way.rank else FLOAT32 if way.sharded else way.compute
    return size * linear + FLOAT32 * (model.parameters - linear)


def _gathered_bytes(model: ModelSizes, way: TrainingPlan) -> int:
    """Return the bytes of the tensors that are gathered whole while in use.

    A layer with its gradients and the layer that is prefetched; the embedding, the head and the
    last norm, which belong to no layer, with their gradients. A frozen base has no gradients."""
    outside = (1 if model.tied else 2) * model.vocabulary * model.hidden + model.hidden
    layers, ends = (2, 1) if way.rank else (3, 2)
    adapters = 3 * _count_adapter_parameters(model, way) // max(model.layers, 1)
    return FLOAT32 * (layers * model.largest_layer + ends * outside + adapters)


def _pass_bytes(model: ModelSizes, way: TrainingPlan) -> dict[str, int]:
    """Return the bytes of a pass, by name, at the larger of its two peaks.

    The first is the backward step through the head, when the activations of all layers are live;
    the second is the backward step through a layer, which may recompute its activations."""
    casts = way.compute if way.compute < FLOAT32 else 0
    of_layer = activation_bytes(model, way.compute) + _adapter_activations(model, way)
    kept = model.layers * (FLOAT32 * model.hidden if way.recomputes else of_layer)
    kept = way.tokens * (kept + _end_bytes(model))
    again = way.tokens * of_layer if way.recomputes else 0
    gradients = way.compute * way.tokens * model.inner
    gradients += 0 if way.rank else FLOAT32 * model.largest_matrix
    names = ("activations", "casts of the weights", "head and logits")
    products = model.products
    if way.rank:
        products = _count_adapter_parameters(model, way) + (
            products if way.base > way.compute else 0
        )
    in_use = products // max(model.layers, 1) if way.recomputes else products
    of_embedding = model.tied and not way.rank
    moments = (
        (kept, 0 if way.recomputes else casts * products, _head_bytes(model, way)),
        (
            kept + again + gradients,
            casts * in_use,
            FLOAT32 * model.vocabulary * model.hidden if of_embedding else 0,
        ),
    )
    return dict(zip(names, max(moments, key=sum), strict=True))


def activation_bytes(model: ModelSizes, compute: int) -> int:
    """Return the bytes that a layer keeps per token for its backward pass, without checkpointing.

    A norm keeps its input and the normalized input, float32. Matrix products keep their inputs in
    the compute type: q, k and v share one tensor in float32, as do gate and up; in bfloat16 each
    product has its own cast. Attention keeps q, k, v, its output and a float32 for each head. The
    MLP keeps gate, its activation, up and their product.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    inputs = 2 if compute == FLOAT32 else 5
    numbers = inputs * model.hidden + 2 * (q + kv) + 4 * model.inner
    size = compute * numbers + FLOAT32 * (NORMS * (2 * model.hidden + 1) + model.heads)
    if model.qk_norm:
        size += (FLOAT32 + compute) * (q + kv) + FLOAT32 * (model.heads + model.kv_heads)
    return size


def _adapter_activations(model: ModelSizes, way: TrainingPlan) -> int:
    """Return the bytes per token that adapters add to the activations of a layer.

    Each A keeps its output, and in bfloat16 the output of attention is cast once more. Norms keep
    less: without trained weights they do not keep the normalized input."""
    if not way.rank:
        return 0
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    size = (
        way.compute * way.rank * len(_get_adapter_modules(model, way))
        - FLOAT32 * NORMS * model.hidden
    )
    size += way.compute * q if way.compute < FLOAT32 else 0
    return size - (way.compute * (q + kv) if model.qk_norm else 0)


def _end_bytes(model: ModelSizes) -> int:
    """Return the bytes per token outside the layers: last norm, scored states, rotary angles."""
    return FLOAT32 * (4 * model.hidden + 2 * model.head_dim + 3)


def _head_bytes(model: ModelSizes, way: TrainingPlan) -> int:
    """Return the bytes of the head for one chunk.

    Gradients of the head add up over the chunks, those of a tied head also with the embedding's."""
    head = model.vocabulary * model.hidden
    tokens = min(way.chunk_tokens, way.tokens)
    chunks = -(-way.tokens // tokens)
    units = LOGIT_BUFFERS_WITH_BONUS if way.entropy_bonus else LOGIT_BUFFERS
    logits = FLOAT32 * units * tokens * model.vocabulary
    if way.rank:  # a base has no gradients; an untied head has the compute type
        cast = way.compute * head if way.compute < (FLOAT32 if model.tied else way.base) else 0
        return logits + cast
    cast = way.compute * head if way.compute < FLOAT32 else 0
    added = FLOAT32 * head * (HEAD_SUMS if chunks > 1 or model.tied else 1)
    return max(logits + cast + (FLOAT32 * head if chunks > 1 else 0), added)
