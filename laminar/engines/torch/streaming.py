"""Streaming of weights tensor by tensor, with prefill of waiting rows layer by layer behind them.

Reads   Hugging Face tensors in the order of arrival; token ids of waiting rows
Writes  the model's weights; the cache of the rows
Gives   StreamedLoad, one load; EngineError as for a load of a whole version

A layer can run once it and all layers before it are loaded. Waiting rows are cut into the chunks of
an ordinary prefill, and each chunk passes through new layers in order: the cache has the same bits
as if the version had been loaded first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor

from laminar.engines.torch.model import DecoderModel, TokenBatch, need_all


class _Chunk:
    """Tokens of some rows, and their progress."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch, self.layers = batch, 0
        self.hidden: Tensor | None = None  #: [n, L, H] after `layers` layers


class StreamedLoad:
    """A version that is being loaded into the model."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._missing = set(model.weights.targets)
        self._chunks: list[_Chunk] = []
        self._copies: list[tuple[int, int, int, int]] = []

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors that have arrived."""
        self._model.weights.copy(tensors, self._missing)

    def fill_cache(self, rows: Sequence[Sequence[int]], first: int, chunk_tokens: int) -> None:
        """Do what `DecoderModel.fill_cache` does, once all weights are loaded."""
        self._chunks += map(_Chunk, self._model.split_chunks(rows, first, chunk_tokens))

    def copy_rows(self, source: int, first: int, count: int, length: int) -> None:
        """Do what `DecoderModel.copy_rows` does, once all weights are loaded."""
        self._copies.append((source, first, count, length))

    def forget_rows(self) -> None:
        """Forget all waiting rows."""
        self._chunks.clear()
        self._copies.clear()

    def advance_layers(self) -> None:
        """Run waiting rows through the layers that are loaded."""
        here = self._model.weights.layers_without(self._missing)
        for chunk in self._chunks:
            _, ids, positions, spans = chunk.batch
            if here > chunk.layers:
                hidden = chunk.hidden
                if hidden is None:
                    hidden = F.embedding(ids, self._model.weights.embed)
                layers = chunk.layers, here
                chunk.hidden = self._model.run_layers(hidden, positions, spans, *layers)
                chunk.layers = here

    def finish_load(self) -> None:
        """Complete load and cache, as after a prefill; EngineError if a tensor is missing."""
        need_all(self._missing)
        self.advance_layers()
        for copy in self._copies:
            self._model.copy_rows(*copy)
