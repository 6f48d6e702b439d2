"""What an emulated replica is made of: an engine that only takes time, rewards out of nothing.

Reads   emulation.*; arenas and checkpoints, which are real
Writes  timeline/NAME.steps
Gives   EmulatedParts, the ReplicaParts of actors/rollout.py
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.actors.host import Host
from laminar.actors.system.emulated_weights import read_checkpoint
from laminar.actors.system.engine_steps import EngineSteps
from laminar.actors.system.weight_files import ReplicaFiles
from laminar.engines.emulated import EmulatedEngine
from laminar.engines.made_up_tokens import END_ID
from laminar.engines.protocol import ReplicaEngine, TokenDelta
from laminar.tasks.rewards import RewardCall, RewardResult


class EmulatedRewards:
    """Right or wrong by the tokens of the answer: the same on every replica."""

    workers_lost = workers_killed = 0

    async def start(self) -> None:
        """There are no workers."""

    async def close(self) -> None:
        """Likewise."""

    async def score(self, call: RewardCall) -> list[RewardResult]:
        return [RewardResult(float(sum(tokens) % 2)) for _, tokens in call.completions]


class EmulatedParts:
    """Of one replica."""

    stop_ids = frozenset({END_ID})

    def __init__(self, host: Host) -> None:
        self._host = host
        self.rewards = EmulatedRewards()
        self.weights = ReplicaFiles(read_checkpoint)
        steps = EngineSteps(host.run_dir, host.name)
        self._steps = host.outlet("engine steps", steps.write)

    async def start_engine(
        self, seed: int, on_deltas: Callable[[list[TokenDelta]], None]
    ) -> ReplicaEngine:
        return EmulatedEngine(self._host.config, on_deltas)

    def decode(self, tokens: list[int]) -> str:
        return f"{len(tokens)} emulated tokens"

    def keep_steps(self, rows: bytes) -> None:
        self._steps.put(rows)
