"""The parts of a real replica: tokenizer, engine, reward workers, weights, step records.

Reads   the model and the reward function of the run; arenas and checkpoints
Writes  timeline/NAME.steps
Gives   RealParts, the ReplicaParts of actors/rollout.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laminar.actors.host import Host
from laminar.actors.system.engine_steps import EngineSteps
from laminar.actors.system.reward_output import make_reward_pool, user_output
from laminar.actors.system.weight_files import ReplicaFiles
from laminar.engines.build import start_engine
from laminar.engines.protocol import ReplicaEngine, TokenDelta
from laminar.run.directory import engine_log
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.tokenizer import end_ids, get_tokenizer_size, load_tokenizer
from laminar.weights.version import checkpoint


class RealParts:
    """The parts of one real replica."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.weights = ReplicaFiles(checkpoint.read_version)
        self.rewards = make_reward_pool(host, user_output(host))
        steps = EngineSteps(host.run_dir, host.name)
        self._steps = host.add_outlet("engine steps", steps.write)

    async def start_engine(
        self, seed: int, on_deltas: Callable[[list[TokenDelta]], None]
    ) -> ReplicaEngine:
        config = self._host.config
        self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.name)
        self.stop_ids = end_ids(config.model.name, self._tokenizer)
        self._decode = make_response_decoder(self._tokenizer, self.stop_ids)
        output = engine_log(self._host.run_dir, self._host.name)
        size = get_tokenizer_size(self._tokenizer)
        return await start_engine(config, size, seed, on_deltas, output)

    def decode(self, tokens: list[int]) -> str:
        return self._decode(tokens)

    def record_steps(self, rows: bytes) -> None:
        self._steps.put(rows)
