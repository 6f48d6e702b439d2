"""Prompts of the simulated store: a data set, and a tokenizer that takes a while.

Gives   StoreProcess, the real actor over these and over the database of the world
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from laminar.actors.host import ActorRole, Host
from laminar.actors.store import Store
from laminar.engines.emulated.fake_tokens import make_prompt
from laminar.storage import messages as m
from laminar.storage.rows import LoadedPrompts, PromptKey
from tools.simulator.machine.database import StoreDatabase
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.scenario import DATA_DIGEST

_PROMPT = m.PromptPayload(prompt="", ground_truth=None, columns={}, data_source="made")
TOKENISE_S = 0.01


class StoreProcess(Idle):
    """The process of the store, with its prompts and a tokenizer that takes a while."""

    def __init__(self, process: SimProcess, database: StoreDatabase) -> None:
        super().__init__(process)
        self._database = database

    def make_actor(self, host: Host) -> ActorRole:
        return Store(host, lambda: self._database, self)

    async def load(self) -> LoadedPrompts:
        await self._work(self.chance.uniform(0, self.scenario.world.start_s))
        train, held_out = self.scenario.world.num_train, self.scenario.config.data.val_size
        return LoadedPrompts([_PROMPT] * train, [_PROMPT] * held_out, 0, DATA_DIGEST)

    async def tokenise_prompts(self, prompts: Mapping[PromptKey, bytes]) -> dict[PromptKey, bytes]:
        await self._work(self.chance.uniform(0, TOKENISE_S))
        return {key: np.array(make_prompt(*key), "<i4").tobytes() for key in prompts}

    async def _work(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * self.process.slow)
