"""The embedded engine: continuous batching over a fixed number of cache slots.

Reads   GenerateRequests; Hugging Face tensors, also while sequences run
Gives   one TokenDelta per running sequence and step

Running sequences occupy slots 0 .. n - 1 without holes (the last one moves into a freed slot), so
each step is one forward pass over neighbouring cache rows. Attention runs over spans of rows of
similar length (spans.py): a step costs the rows' lengths, not the longest row for each. Requests
that arrive with the same tokens, such as a group's siblings, are prefilled once and get copies of
the cache. Sequences that continue with other weights keep their cache or are prefilled again; a
prompt's cache is copied only to a sequence of the same load. While weights arrive, waiting requests
get their slots and are prefilled behind them (streaming.py). Scores have a separate cache, so that
none of this is touched. Sampling is counter-based: a sequence that migrates to another replica of
the same weights continues with the very same tokens (float32; reduced precision rounds differently
from one batch to another).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.engines.hf_config import parse_hf_config
from laminar.engines.protocol import (
    LENGTH,
    STOP,
    EngineError,
    EngineStats,
    GenerateRequest,
    KvOnUpdate,
    TokenDelta,
)
from laminar.engines.requests import check_request, check_sequence
from laminar.engines.spans import Lengths, SlotSpan, SpanPlanner, round_up
from laminar.engines.torch.model import DecoderModel
from laminar.engines.torch.sampling import draw_uniforms
from laminar.engines.torch.streaming import StreamedLoad

PREFILL_CHUNK = 2048  #: tokens of one prefill pass, over all its rows
SCORE_CHUNK = 512  #: smaller, because scoring holds the logits of every token
SCORE_CACHE = 8192  #: positions of the cache for scores, unless a sequence is longer


@dataclass(slots=True)
class _Sequence:
    """A running request; the cache has its tokens except the last."""

    request: GenerateRequest
    ids: list[int]  #: prompt included
    load: int  #: number of the load whose weights made the prompt's cache


class TorchEngine:
    """Engine (see `protocol.Engine`) in this process; initially without weights."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        vocab_limit: int | None = None,
    ) -> None:
        """Allocate weights and cache; ids at or above `vocab_limit` are never sampled."""
        spec = parse_hf_config(hf_config)
        _check_sizes(max_num_seqs, max_model_len, spec.max_positions)
        if dtype not in (torch.float32, torch.bfloat16):
            raise EngineError(f"dtype = {dtype} is not supported; use float32 or bfloat16")
        limit = spec.vocab_size if vocab_limit is None else vocab_limit
        if not 1 <= limit <= spec.vocab_size:
            raise EngineError(
                f"vocab_limit = {limit} does not fit the model's vocab_size = {spec.vocab_size}; "
                "use the tokenizer that belongs to the model"
            )
        self._slots, self._max_len = max_num_seqs, max_model_len
        self._model = DecoderModel(
            spec,
            slots=max_num_seqs,
            max_len=max_model_len,
            vocab_limit=limit,
            dtype=dtype,
            device=torch.device(device),
        )
        self._spans = SpanPlanner(self._model.call_cost)
        self._loaded = False
        self._loads = 0  #: loads that have begun
        #: the last load, if streamed, until the first sampling with it
        self._streamed: StreamedLoad | None = None
        self._active: list[_Sequence] = []  # index = slot
        self._waiting: deque[GenerateRequest] = deque()

    def add(self, request: GenerateRequest) -> None:
        name = f"request {request.request_id}"
        ids = {s.request.request_id for s in self._active} | {r.request_id for r in self._waiting}
        if request.request_id in ids:
            raise EngineError(f"{name} is already running; abort it first")
        check_request(request, self._max_len, self._model.vocab_limit)
        self._waiting.append(request)

    def abort_request(self, request_id: str) -> bool:
        if self._streamed is not None and not self._loaded:
            self._requeue_active(self._streamed)
        for slot, sequence in enumerate(self._active):
            if sequence.request.request_id == request_id:
                self._release_slot(slot)
                return True
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        return False

    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        if not self._active and not self._waiting:
            return []
        self._require_weights()
        self._streamed = None
        self._admit_waiting(self._model)
        lengths = self._reorder_rows()
        spans = self._spans.compute_spans(lengths)
        return self._emit_deltas(*_decode_step(self._model, self._active, lengths, spans))

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], on_update: KvOnUpdate | None = None
    ) -> None:
        self._begin_load(on_update)
        try:
            self._model.weights.load(tensors)
        except EngineError:
            self.close()
            raise
        self._loaded = True
        if on_update == "recompute":
            self._prefill_again()

    def expect_weights(self) -> None:
        self._begin_load()
        self._streamed = StreamedLoad(self._model)

    @torch.inference_mode()
    def load_partial(self, tensors: Iterable[tuple[str, Tensor]], last: bool) -> None:
        if self._streamed is None or self._loaded:
            raise EngineError("no weights are expected; call expect_weights first")
        try:
            self._streamed.copy(tensors)
            self._admit_waiting(self._streamed)
            self._streamed.advance_layers()
            if last:
                self._streamed.finish_load()
        except EngineError:
            self.close()
            raise
        self._loaded = last

    @torch.inference_mode()
    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._require_weights()
        for index, sequence in enumerate(sequences):
            name = f"sequence {index}"
            check_sequence(name, sequence, self._max_len, self._model.vocab_limit)
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        scores: list[list[float]] = [[] for _ in sequences]
        while order:
            longest = round_up(len(sequences[order[0]]))
            count = max(1, SCORE_CACHE // longest)
            batch, order = order[:count], order[count:]
            with self._model.use_temporary_cache(len(batch), longest):
                rows = self._model.compute_logprobs([sequences[i] for i in batch], SCORE_CHUNK)
            self._require_finite([score for row in rows for score in row])
            for index, row in zip(batch, rows, strict=True):
                scores[index] = row
        return scores

    def get_stats(self) -> EngineStats:
        return EngineStats(
            kv_used_tokens=sum(len(sequence.ids) for sequence in self._active),
            kv_capacity_tokens=self._slots * self._max_len,
            running=len(self._active),
            waiting=len(self._waiting),
        )

    def close(self) -> None:
        self._active.clear()
        self._waiting.clear()

    def _requeue_active(self, streamed: StreamedLoad) -> None:
        """Move requests that got a slot during a streamed load back to the queue, in order."""
        streamed.forget_rows()
        self._waiting.extendleft(s.request for s in reversed(self._active))
        self._active.clear()

    def _require_weights(self) -> None:
        if not self._loaded:
            raise EngineError("the engine has no weights; call load_weights first")

    def _begin_load(self, on_update: KvOnUpdate | None = None) -> None:
        self._loads += 1
        if on_update is None and self._active:
            raise EngineError(
                f"cannot load weights while {len(self._active)} sequences are running; "
                "finish or abort them first"
            )
        if self._streamed is not None:  # a NaN of broken weights would outlive them
            self._model.cache.clear()
        self._loaded, self._streamed = False, None

    def _require_finite(self, logprobs: list[float]) -> None:
        """Refuse a broken model's output, and leave nothing of it in the cache.

        A NaN there would outlive its weights: masked positions are multiplied by 0, and 0 * NaN
        is NaN. Running sequences then have lost their cache and are dropped.
        """
        if all(map(math.isfinite, logprobs)):
            return
        self.close()
        self._model.cache.clear()
        raise EngineError(
            "the model computes non-finite logits: the loaded weights are broken; "
            "all sequences were dropped, load other weights"
        )

    def _admit_waiting(self, cached: DecoderModel | StreamedLoad) -> None:
        """Move waiting requests into the free slots and fill their cache, now or behind weights.

        The first request of each distinct token sequence is prefilled, all of them together; the
        others, and those whose prompt already runs, get copies. This fills only the cache: the last
        token of each goes through the decode step.
        """
        siblings: dict[tuple[int, ...], list[GenerateRequest]] = {}
        for _ in range(min(self._slots - len(self._active), len(self._waiting))):
            request = self._waiting.popleft()
            siblings.setdefault(request.prompt_ids + request.done_ids, []).append(request)
        if not siblings:
            return
        self._spans.discard_plan()
        sources = {
            s.request.prompt_ids: slot
            for slot, s in enumerate(self._active)
            if s.load == self._loads
        }
        fresh = sorted((ids for ids in siblings if ids not in sources), key=len, reverse=True)
        first = len(self._active)
        for slot, ids in enumerate(fresh, first):
            self._active.append(_Sequence(siblings[ids].pop(0), list(ids), self._loads))
            sources[ids] = slot
        if fresh:
            cached.fill_cache([ids[:-1] for ids in fresh], first, PREFILL_CHUNK)
        for ids, requests in siblings.items():
            copies = [_Sequence(request, list(ids), self._loads) for request in requests]
            cached.copy_rows(sources[ids], len(self._active), len(copies), len(ids) - 1)
            self._active += copies

    @torch.inference_mode()
    def _prefill_again(self) -> None:
        """Recompute the cache of all running sequences with the present weights."""
        self._active.sort(key=lambda sequence: -len(sequence.ids))
        self._spans.discard_plan()
        if self._active:
            self._model.fill_cache(
                [sequence.ids[:-1] for sequence in self._active], 0, PREFILL_CHUNK
            )
        for sequence in self._active:
            sequence.load = self._loads

    def _reorder_rows(self) -> Lengths:
        """Move the running rows if that saves time; return their lengths."""
        lengths = np.fromiter((len(s.ids) for s in self._active), np.int64, len(self._active))
        order = self._spans.choose_order(lengths)
        if order is None:
            return lengths
        self._model.cache.reorder_slots(order, (lengths - 1).tolist())
        self._active = [self._active[slot] for slot in order]
        return lengths[order]

    def _emit_deltas(self, tokens: list[int], logprobs: list[float]) -> list[TokenDelta]:
        self._require_finite(logprobs)
        deltas, finished = [], []
        for slot, sequence in enumerate(self._active):
            request, token, logprob = sequence.request, tokens[slot], logprobs[slot]
            sequence.ids.append(token)
            reason = None
            if token in request.stop_ids:
                reason = STOP
            elif len(sequence.ids) - len(request.prompt_ids) >= request.max_new_tokens:
                reason = LENGTH
            if reason:
                finished.append(slot)
            deltas.append(TokenDelta(request.request_id, [token], [logprob], reason, self._loads))
        for slot in reversed(finished):  # from the end: the row moved down is never finished itself
            self._release_slot(slot)
        return deltas

    def _release_slot(self, slot: int) -> None:
        """Free a slot; the last running sequence moves into it."""
        self._spans.discard_plan()
        last = self._active.pop()
        if slot < len(self._active):
            self._model.cache.copy(len(self._active), slot, 1, len(last.ids) - 1)
            self._active[slot] = last


def _decode_step(
    model: DecoderModel, sequences: Sequence[_Sequence], lengths: Lengths, spans: Sequence[SlotSpan]
) -> tuple[list[int], list[float]]:
    """Run one forward pass over all running sequences; return sampled ids and log-probs."""
    n = len(sequences)
    last_ids = np.fromiter((s.ids[-1] for s in sequences), np.int64, n)
    seeds = np.fromiter((s.request.seed for s in sequences), np.uint64, n)
    temperatures = np.fromiter((s.request.temperature for s in sequences), np.float64, n)
    integers = torch.from_numpy(np.stack((last_ids, lengths - 1))).to(model.device)
    reals = torch.from_numpy(np.stack((temperatures, draw_uniforms(seeds, lengths)))).to(
        model.device
    )
    hidden = model.forward(integers[0, :, None], integers[1, :, None], spans)
    tokens, logprobs = sample_tokens(model.compute_logits(hidden[:, 0]), reals[0], reals[1])
    return tokens.tolist(), logprobs.tolist()


def sample_tokens(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one id per row of float32 `logits` [n, V] by inverse CDF.

    `temperatures` and `uniform` are float64 [n]; temperature 0 takes the largest logit. Returns
    ids [n] and float32 log-probs [n] of softmax(logits / T), of softmax(logits) for greedy rows.
    The cumulative sum is float64: in float32 the tail of a large vocabulary gets no mass.
    """
    greedy = temperatures == 0
    divisor = torch.where(greedy, 1.0, temperatures).float()
    scaled = logits / divisor[:, None]
    top, top_ids = scaled.max(-1)
    cumulative = (scaled.double() - top[:, None]).exp_().cumsum(-1)
    total = cumulative[:, -1]
    # right=True gives the first id whose cumulative mass exceeds the draw: one with mass above 0.
    drawn = torch.searchsorted(cumulative, (uniform * total)[:, None], right=True)[:, 0]
    ids = torch.where(greedy, top_ids, drawn.clamp_max_(logits.shape[1] - 1))
    chosen = scaled.gather(-1, ids[:, None])[:, 0]
    return ids, ((chosen.double() - top) - total.log()).float()


def _check_sizes(max_num_seqs: int, max_model_len: int, max_positions: int) -> None:
    if max_num_seqs < 1:
        raise EngineError(f"max_num_seqs = {max_num_seqs} is too small; it must be at least 1")
    if not 2 <= max_model_len <= max_positions:
        raise EngineError(
            f"max_model_len = {max_model_len} must lie between 2 and the model's "
            f"max_position_embeddings = {max_positions}"
        )
