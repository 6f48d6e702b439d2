"""The decoder's mathematics: weights, key-value cache and one forward pass over slots.

Reads   ModelSpec, Hugging Face tensors by name, token ids with their positions
Gives   hidden states and logits; the cache rows of its slots

One forward pass serves prefill, decode and scoring: n rows of L tokens in neighbouring slots, so
that the cache is read as a view, without a gather; each span of rows (spans.py) is one attention
call over its number of positions. The heads of a group that share a key head are folded into the
query length, because fused attention kernels then read each key once and no repeated copy is made.
Q, K, V and gate, up are one matrix each: a small model's step is bound by the number of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar.engines.hf_config import ModelSpec
from laminar.engines.protocol import EngineError
from laminar.engines.spans import SlotSpan, round_up

_HINT = "the model's parameters under their Hugging Face names (a tied head only once)"

CALL_BYTES = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Bytes of keys and values that can be read in the time of one more attention call."""


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer; H hidden, I intermediate, D head size, h query and k key heads."""

    input_norm: Tensor  #: [H]
    qkv: Tensor  #: [(h + 2k) * D, H]
    qkv_bias: Tensor | None  #: [(h + 2k) * D]
    qk_norm: Tensor | None  #: [2, D], for query and key heads
    o: Tensor  #: [H, h * D]
    post_norm: Tensor  #: [H]
    gate_up: Tensor  #: [2 * I, H]
    down: Tensor  #: [H, I]


class DecoderWeights:
    """All parameters, allocated once; `targets` are views of them by Hugging Face name."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.embed = empty(spec.vocab_size, hidden)
        self.norm = empty(hidden)
        self.head = self.embed if spec.tied else empty(spec.vocab_size, hidden)
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(rows, hidden),
                qkv_bias=empty(rows) if spec.qkv_bias else None,
                qk_norm=empty(2, spec.head_dim) if spec.qk_norm else None,
                o=empty(hidden, spec.num_heads * spec.head_dim),
                post_norm=empty(hidden),
                gate_up=empty(2 * inner, hidden),
                down=empty(hidden, inner),
            )
            for _ in range(spec.num_layers)
        ]
        self.targets = dict(self._iter_named_tensors(spec))

    def _iter_named_tensors(self, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embed
        yield "model.norm.weight", self.norm
        if not spec.tied:
            yield "lm_head.weight", self.head
        for index, layer in enumerate(self.layers):
            for name, tensor in _iter_layer_tensors(layer, spec):
                yield f"model.layers.{index}.{name}", tensor

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor to its place; EngineError unless names and shapes match exactly."""
        missing = set(self.targets)
        self.copy(tensors, missing)
        need_all(missing)

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Tensor]], missing: set[str]) -> None:
        """Copy tensors to their places and remove their names from `missing`; EngineError."""
        for name, tensor in tensors:
            target = self.targets.get(name)
            if target is None:
                raise EngineError(f"tensor {name} is not used by this model; publish only {_HINT}")
            if name not in missing:
                raise EngineError(f"tensor {name} is given twice; publish it once")
            if tensor.shape != target.shape or not tensor.is_floating_point():
                raise EngineError(
                    f"tensor {name} is {tensor.dtype} {list(tensor.shape)}; "
                    f"the model needs floating point {list(target.shape)}"
                )
            target.copy_(tensor)
            missing.remove(name)

    def layers_without(self, missing: set[str]) -> int:
        """Return how many layers from the first can run while these tensors are missing."""
        if "model.embed_tokens.weight" in missing:
            return 0
        incomplete = (int(n.split(".")[2]) for n in missing if n.startswith("model.layers."))
        return min(incomplete, default=len(self.layers))


def need_all(missing: set[str]) -> None:
    """Raise EngineError if a tensor is missing."""
    if missing:
        raise EngineError(
            f"tensor {min(missing)} is missing, one of {len(missing)}; publish {_HINT}"
        )


def _iter_layer_tensors(layer: LayerWeights, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    sizes = [heads * spec.head_dim for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)]
    for part, tensor in zip("qkv", torch.split(layer.qkv, sizes), strict=True):
        yield f"self_attn.{part}_proj.weight", tensor
    if layer.qkv_bias is not None:
        for part, tensor in zip("qkv", torch.split(layer.qkv_bias, sizes), strict=True):
            yield f"self_attn.{part}_proj.bias", tensor
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", layer.qk_norm[0]
        yield "self_attn.k_norm.weight", layer.qk_norm[1]
    gate, up = layer.gate_up.chunk(2)
    yield "input_layernorm.weight", layer.input_norm
    yield "self_attn.o_proj.weight", layer.o
    yield "post_attention_layernorm.weight", layer.post_norm
    yield "mlp.gate_proj.weight", gate
    yield "mlp.up_proj.weight", up
    yield "mlp.down_proj.weight", layer.down


class KVCache:
    """Keys and values of all slots: [layers, slots, kv heads, positions, head size]."""

    def __init__(
        self, spec: ModelSpec, slots: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.num_layers, slots, spec.num_kv_heads, positions, spec.head_dim)
        # Zeros, not empty: masked values must be finite.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def clear(self) -> None:
        self.k.zero_()
        self.v.zero_()

    def copy(self, source: int, first: int, count: int, length: int) -> None:
        """Copy the first `length` positions of `source` to slots first .. first + count - 1."""
        for cache in (self.k, self.v):
            cache[:, first : first + count, :, :length] = cache[:, source, None, :, :length]

    def reorder_slots(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """Move slot order[slot] to each slot; `lengths`: positions to move, by old slot."""
        sources = {slot: source for slot, source in enumerate(order) if slot != source}
        while sources:
            slot = first = next(iter(sources))
            kept = slice(0, lengths[first])
            k, v = self.k[:, first, :, kept].clone(), self.v[:, first, :, kept].clone()
            while (source := sources.pop(slot)) != first:
                self.copy(source, slot, 1, lengths[source])
                slot = source
            self.k[:, slot, :, kept], self.v[:, slot, :, kept] = k, v


class TokenBatch(NamedTuple):
    """Tokens of neighbouring slots that pass through the layers together."""

    start: int  #: common first position of the rows, if there is one
    ids: Tensor  #: [n, L]
    positions: Tensor  #: [n, L], or with one span [1, L] for all
    spans: Sequence[SlotSpan]


class DecoderModel:
    """A Qwen2, Qwen3 or Llama decoder over the slots of one cache."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        slots: int,
        max_len: int,
        vocab_limit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype
        self.vocab_limit = vocab_limit
        positions = round_up(max_len)
        self.weights = DecoderWeights(spec, dtype, device)
        self.cache = self._make_cache(slots, positions)
        self.cos, self.sin = (table.to(device, dtype) for table in _rope_tables(spec, positions))
        self._steps = torch.arange(positions, device=device)
        position_bytes = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        #: cached positions of one layer that can be read in the time of one more attention call
        self.call_cost = CALL_BYTES[device.type] // position_bytes
        kinds = [0] * spec.num_heads + [1] * spec.num_kv_heads
        self._head_kind = torch.tensor(kinds, device=device)

    def _make_cache(self, slots: int, positions: int) -> KVCache:
        return KVCache(self.spec, slots, positions, self.dtype, self.device)

    @contextmanager
    def use_temporary_cache(self, slots: int, positions: int) -> Iterator[None]:
        """Use another cache, of this size, within the context."""
        kept, self.cache = self.cache, self._make_cache(slots, positions)
        try:
            yield
        finally:
            self.cache = kept

    def forward(self, ids: Tensor, positions: Tensor, spans: Sequence[SlotSpan]) -> Tensor:
        """Run `ids` [n, L] at `positions` ([n, L], or with one span [1, L] for all) in n slots.

        Keys and values are written to the cache, and each token attends to the positions up to
        its own. `spans` cover the n neighbouring slots; the kv_len of each, a multiple of KV_ROUND,
        is above every position of its rows. Returns normalized hidden states [n, L, H].
        """
        x = F.embedding(ids, self.weights.embed)
        x = self.run_layers(x, positions, spans, 0, len(self.weights.layers))
        return self._apply_norm(x, self.weights.norm)

    def run_layers(
        self, x: Tensor, positions: Tensor, spans: Sequence[SlotSpan], begin: int, end: int
    ) -> Tensor:
        """Run hidden states [n, L, H] through layers `begin` to `end` - 1, as `forward` does."""
        rows = self._steps[spans[0].first : spans[-1].stop, None]
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        parts = zip(_split_by_span(positions, spans), spans, strict=True)
        masks = [self._make_mask(part, span.kv_len) for part, span in parts]
        for index in range(begin, end):
            layer = self.weights.layers[index]
            q, k, v = self._project_qkv(layer, self._apply_norm(x, layer.input_norm), cos, sin)
            keys, values = self.cache.k[index], self.cache.v[index]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            attended = self._run_attention(q, keys, values, spans, masks)
            x = x + F.linear(attended, layer.o)
            gate, up = F.linear(self._apply_norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits [..., vocab_limit], without ids that the tokenizer lacks.

        That equals masking them with -inf, and saves their share of the product.
        """
        return F.linear(hidden, self.weights.head[: self.vocab_limit]).float()

    def prefill_rows(
        self, rows: Sequence[Sequence[int]], first: int, chunk_tokens: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Run whole rows, longest first, from position 0, in slots first, first + 1, ...

        Yields (first position of the chunk, hidden states [rows that reach it, L, H]).
        """
        for chunk in self.split_chunks(rows, first, chunk_tokens):
            yield chunk.start, self.forward(chunk.ids, chunk.positions, chunk.spans)

    def fill_cache(self, rows: Sequence[Sequence[int]], first: int, chunk_tokens: int) -> None:
        """Prefill these rows for their cache alone."""
        for _ in self.prefill_rows(rows, first, chunk_tokens):
            pass

    def copy_rows(self, source: int, first: int, count: int, length: int) -> None:
        """Copy the first `length` positions of `source` to slots first .. first + count - 1."""
        self.cache.copy(source, first, count, length)

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], chunk_tokens: int
    ) -> list[list[float]]:
        """Return log-probs of tokens 1..L-1 of sequences, longest first, in slots 0, 1, ..."""
        rows = [sequence[:-1] for sequence in sequences]
        found: list[list[float]] = [[] for _ in rows]
        for start, hidden in self.prefill_rows(rows, 0, chunk_tokens):
            logits = self.compute_logits(hidden)
            totals = logits.logsumexp(-1)
            for row, sequence in enumerate(sequences[: len(logits)]):
                ids = torch.tensor(sequence[start + 1 : start + 1 + logits.shape[1]])
                chosen = logits[row, : len(ids)].gather(-1, ids.to(logits.device)[:, None])
                found[row] += (chosen[:, 0] - totals[row, : len(ids)]).tolist()
        return found

    def split_chunks(
        self, rows: Sequence[Sequence[int]], first: int, chunk_tokens: int
    ) -> Iterator[TokenBatch]:
        """Yield the batches of a prefill, each at most about `chunk_tokens` tokens.

        Rows are right-padded within a chunk: padding in the cache lies behind the row's end, where
        the row's next tokens overwrite it before anything attends to it.
        """
        start, longest = 0, len(rows[0])
        while start < longest:
            count = sum(len(row) > start for row in rows)
            end = min(start + max(1, chunk_tokens // count), longest)
            ids = torch.zeros((count, end - start), dtype=torch.long)
            for row, padded in zip(rows, ids, strict=False):
                part = torch.tensor(row[start:end])
                padded[: len(part)] = part
            positions = self._steps[None, start:end]
            spans = [SlotSpan(first, first + count, round_up(end))]
            yield TokenBatch(start, ids.to(self.device), positions, spans)
            start = end

    def _apply_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_norm_eps)

    def _make_mask(self, positions: Tensor, kv_len: int) -> Tensor:
        """Make the additive causal mask [rows, 1, group * L, kv_len] (rows 1 if they share it)."""
        rows, length = positions.shape
        group = self.spec.num_heads // self.spec.num_kv_heads
        hidden = self._steps[:kv_len] > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(hidden, -math.inf)[:, None, None]
        return mask.expand(-1, -1, group, -1, -1).reshape(rows, 1, group * length, kv_len)

    def _project_qkv(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [n, L, h, D] and k [n, L, k, D], and v [n, L, k, D]."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=2)
        if layer.qk_norm is not None:
            size = (self.spec.head_dim,)
            qk = F.rms_norm(qk, size, None, self.spec.rms_norm_eps)
            qk = qk * layer.qk_norm[self._head_kind]
        qk = qk * cos + qk.roll(self.spec.head_dim // 2, -1) * sin
        q, k = torch.split(qk, [heads, kv_heads], dim=2)
        return q, k, v

    def _run_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        spans: Sequence[SlotSpan],
        masks: Sequence[Tensor],
    ) -> Tensor:
        """Attend with q [n, L, h, D] to a layer's keys, values [slots, k, T, D]: [n, L, h * D]."""
        n, length, heads, size = q.shape
        kv_heads = self.spec.num_kv_heads
        q = q.view(n, length, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(n, kv_heads, -1, size)
        parts = [
            F.scaled_dot_product_attention(
                part, keys[first:stop, :, :kv_len], values[first:stop, :, :kv_len], attn_mask=mask
            )
            for part, (first, stop, kv_len), mask in zip(
                _split_by_span(q, spans), spans, masks, strict=True
            )
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = out.view(n, kv_heads, -1, length, size).permute(0, 3, 1, 2, 4)
        return out.reshape(n, length, heads * size)


def _split_by_span(rows: Tensor, spans: Sequence[SlotSpan]) -> Sequence[Tensor]:
    """Return the rows of each span; a single span needs no kernel or view."""
    return [rows] if len(spans) == 1 else rows.split([stop - first for first, stop, _ in spans])


def _rope_tables(spec: ModelSpec, positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [positions, D] in float32.

    The two elements of a rotation lie half a head apart. The sine of the first half is negated, so
    that x * cos + roll(x, D / 2) * sin is the rotation.
    """
    angles = torch.arange(positions).float()[:, None] * _compute_frequencies(spec)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _compute_frequencies(spec: ModelSpec) -> Tensor:
    """Return radians per position [D / 2], scaled as in Llama 3.1 if the spec says so.

    Wavelengths above original length / low factor are stretched by `factor`, those below
    original length / high factor are kept, and between them the two are blended linearly.
    """
    exponents = torch.arange(0, spec.head_dim, 2).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling.factor * (1.0 - keep)
