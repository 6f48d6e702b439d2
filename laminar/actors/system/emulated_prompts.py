"""The prompts of an emulated run: as many as data.dataset_size, of data.max_prompt_length tokens.

Gives   EmulatedPrompts, the Prompts of actors/store.py
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.config import Config
from laminar.engines.made_up_tokens import tokens_of
from laminar.names.ids import hash64
from laminar.storage import messages as m
from laminar.storage.rows import LoadedPrompts, PromptKey


class EmulatedPrompts:
    """Held-out ones are the last."""

    def __init__(self, config: Config) -> None:
        self._data = config.data

    async def load(self) -> LoadedPrompts:
        data = self._data
        rows = [_payload(index) for index in range(data.dataset_size)]
        num_train = data.dataset_size - data.val_size
        digest = f"emulated, {data.dataset_size} of {data.max_prompt_length} tokens"
        return LoadedPrompts(rows[:num_train], rows[num_train:], 0, digest)

    async def tokenise(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        length = self._data.max_prompt_length
        return {
            key: tokens_of(hash64("prompt", str(m.decode_prompt(payload).prompt)), 0, length)
            for key, payload in prompts.items()
        }


def _payload(index: int) -> m.PromptPayload:
    return m.PromptPayload(
        prompt=f"emulated prompt {index}",
        ground_truth="",
        columns={},
        data_source="emulated",
        prompt_ids=b"",
    )
