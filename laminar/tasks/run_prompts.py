"""The prompts of a run for its store: read and checked at its start, tokenised when needed.

Reads   the data and the tokenizer of a configuration
Gives   RunPrompts; raises ConfigError

Reading and tokenising run in a thread, because the process has to renew a lease meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from laminar.config import Config
from laminar.storage import messages as m
from laminar.storage.rows import LoadedPrompts, PromptKey
from laminar.tasks.data.chat import CheckedPrompts, check_prompts, encode_prompt
from laminar.tasks.data.prompts import PromptRow, PromptSet, load_prompts
from laminar.tasks.data.tokenizer import load_tokenizer
from laminar.tasks.environments.user_class import decode_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RunPrompts:
    """The data of a configuration and its tokenizer."""

    def __init__(self, config: Config) -> None:
        self._config, self._tools = config, decode_tools(config.env)
        self._tokenizer: PreTrainedTokenizerBase | None = None

    async def load(self) -> LoadedPrompts:
        """Read and check all prompts; raise ConfigError."""
        return await asyncio.to_thread(self._load)

    async def tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        """Return the token ids of payloads, int32 little-endian; raise ConfigError."""
        return await asyncio.to_thread(self._tokenise_prompts, prompts)

    def _load(self) -> LoadedPrompts:
        prompts = load_prompts(self._config.data, with_columns=self._config.has_sessions)
        self._tokenizer = load_tokenizer(self._config.model.name)
        return self._check_rows(self._tokenizer, prompts)

    def _check_rows(self, tokenizer: PreTrainedTokenizerBase, prompts: PromptSet) -> LoadedPrompts:
        train, held_out = (
            _make_payloads(check_prompts(tokenizer, rows, self._config.data, self._tools))
            for rows in (prompts.train, prompts.held_out)
        )
        return LoadedPrompts(train, held_out, prompts.overlap, prompts.digest)

    def _tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        assert self._tokenizer is not None, "the data is not loaded yet"
        found = {}
        for key, payload in prompts.items():
            kept = m.decode_prompt(payload)
            row = PromptRow(key.row_index, kept.prompt, None, {}, kept.data_source)
            ids = encode_prompt(self._tokenizer, row, self._config.data, self._tools)
            found[key] = _pack_ids(ids)
        return found


def _make_payloads(prompts: CheckedPrompts) -> list[m.PromptPayload]:
    """Convert rows to the form in which the store keeps them."""
    return [
        m.PromptPayload(
            prompt=row.prompt,
            ground_truth=row.ground_truth,
            columns=row.columns,
            data_source=row.data_source,
            prompt_ids=b"" if ids is None else _pack_ids(ids),
        )
        for row, ids in zip(prompts.rows, prompts.ids, strict=True)
    ]


def _pack_ids(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()
