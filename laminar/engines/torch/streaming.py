"""Weights that arrive tensor by tensor, and the prefill of what waits, layer by layer behind them.

Reads   Hugging Face tensors in the order in which they come; token ids of waiting rows
Writes  the model's weights; the cache of the rows
Gives   Streamed, one load; EngineError as a load of a whole version has it

A layer can be run when it and all before it are here. Rows that wait are cut into the chunks of an
ordinary prefill, and each chunk goes through the layers that are new, in order: the cache has the
same bits as if the version had been loaded first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor

from laminar.engines.torch.model import Batch, DecoderModel, need_all


class _Chunk:
    """Tokens of some rows, and how far they are."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.layers = batch, 0
        self.hidden: Tensor | None = None  #: [n, L, H] after so many layers


class StreamedLoad:
    """One version on its way into the model."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._missing = set(model.weights.targets)
        self._chunks: list[_Chunk] = []
        self._copies: list[tuple[int, int, int, int]] = []

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors that have come."""
        self._model.weights.copy(tensors, self._missing)

    def fill_cache(self, rows: Sequence[Sequence[int]], first: int, chunk_tokens: int) -> None:
        """As `DecoderModel.fill`, when all is here."""
        self._chunks += map(_Chunk, self._model.split_chunks(rows, first, chunk_tokens))

    def copy_rows(self, source: int, first: int, count: int, length: int) -> None:
        """As `DecoderModel.copy_rows`, when all is here."""
        self._copies.append((source, first, count, length))

    def forget_rows(self) -> None:
        """No row waits any more."""
        self._chunks.clear()
        self._copies.clear()

    def advance_layers(self) -> None:
        """Run what waits through the layers that are here."""
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
        """All of it has come: EngineError if not, else the cache is as after a prefill."""
        need_all(self._missing)
        self.advance_layers()
        for copy in self._copies:
            self._model.copy_rows(*copy)
