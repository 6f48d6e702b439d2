"""The parts of a real replica: tokenizer, engine, reward workers, weights, step records.

Reads   the model, the reward function and the environment of the run; arenas and checkpoints
Writes  timeline/NAME.steps; output of the user's code: logs/latest/NAME.reward.log
Gives   RealParts, the ReplicaParts of actors/rollout.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar.actors.host import Host
from laminar.actors.system.engine_steps import EngineSteps
from laminar.actors.system.weight_files import ReplicaFiles
from laminar.engines.build import start_engine
from laminar.engines.protocol import ReplicaEngine, TokenDelta
from laminar.run.child_process import Output
from laminar.run.directory import engine_log, reward_log
from laminar.run.fail_points import RUN_VARIABLE
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.tokenizer import end_ids, get_tokenizer_size, load_tokenizer
from laminar.tasks.environments.agents import Agents
from laminar.tasks.environments.pool import Environments
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.tool_calls import CallParser
from laminar.tasks.environments.user_class import decode_tools
from laminar.tasks.rewards.reward_functions import reward_spec
from laminar.tasks.rewards.worker_pool import RewardPool
from laminar.weights.version import checkpoint

OUTPUT_BYTES_MAX = 8 << 20
"""Bytes of output kept per replica: a thousand replicas may share a file system."""
PIECES_KEPT_MAX = 256
"""Pieces that may wait for the file; each is up to the size of a pipe, 64 KiB."""


def user_output(host: Host) -> Output:
    """Return the receiver of the user code's output in this process's workers, for its log."""
    printed = OutputLog(reward_log(host.run_dir, host.name))
    return host.add_outlet("reward output", printed.write, kept=PIECES_KEPT_MAX).put


def make_reward_pool(host: Host, on_output: Output) -> RewardPool:
    """Return the reward pool of this process (not started)."""
    reward = host.config.reward
    return RewardPool(
        reward_spec(host.config),
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        error_score=reward.error_score,
        max_retries=reward.max_retries,
        env={RUN_VARIABLE: str(host.run_dir)},
        on_output=on_output,
    )


class RealParts:
    """The parts of one real replica."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.weights = ReplicaFiles(checkpoint.read_version)
        self._printed = user_output(host)
        self.rewards = make_reward_pool(host, self._printed)
        steps = EngineSteps(host.run_dir, host.name)
        self._steps = host.add_outlet("engine steps", steps.write)
        self.environments: Environments | Agents | None = None

    async def start_engine(
        self, seed: int, on_deltas: Callable[[list[TokenDelta]], None]
    ) -> ReplicaEngine:
        config = self._host.config
        self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.name)
        self.stop_ids = end_ids(config.model.name, self._tokenizer)
        self._decode = make_response_decoder(self._tokenizer, self.stop_ids)
        if config.agents.label:
            self.environments = Agents(
                config, self._tokenizer, self.stop_ids, self._decode, self._printed
            )
        elif config.has_sessions:
            self.environments = self._make_environments()
        output = engine_log(self._host.run_dir, self._host.name)
        size = get_tokenizer_size(self._tokenizer)
        return await start_engine(config, size, seed, on_deltas, output)

    def _make_environments(self) -> Environments:
        """Return environments, not started, whose output goes with that of the reward functions."""
        config, tools = self._host.config, decode_tools(self._host.config.env)
        tokenizer = self._tokenizer
        return Environments(
            config,
            SessionPool.from_config(
                config.env, on_output=self._printed, reward=reward_spec(config)
            ),
            Renderer(tokenizer, config.data, tools, self.stop_ids),
            CallParser(tokenizer, tools),
            self.decode,
        )

    def decode(self, tokens: list[int]) -> str:
        return self._decode(tokens)

    def record_steps(self, rows: bytes) -> None:
        self._steps.put(rows)


class OutputLog:
    """A log of limited size for the output of reward functions; one process writes it at a time.

    User code may print for days, and not on a terminal. The beginning is kept, because it shows the
    first error.
    """

    def __init__(self, path: Path, bytes_max: int = OUTPUT_BYTES_MAX) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._full = False

    def write(self, pieces: Sequence[bytes]) -> None:
        if self._full:
            return
        data = b"".join(pieces)
        with open(self._path, "ab") as file:
            room = self._bytes_max - file.tell()
            self._full = len(data) > room
            if room > 0:
                file.write(data[:room] + (self._format_truncation() if self._full else b""))

    def _format_truncation(self) -> bytes:
        return f"\n... output beyond {self._bytes_max} bytes is dropped\n".encode()
