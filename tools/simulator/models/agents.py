"""A host of agents in virtual time: its sessions, which answer after a while, and rewards.

Reads   rows of the store; whether a fault strikes
Gives   HostProcess, the real actor over these; Rewards, those of replicas, too
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from laminar.actors.agent_host import AgentHost
from laminar.actors.host import ActorRole, Host
from laminar.engines.emulated.fake_tokens import make_prompt
from laminar.engines.emulated.timing import P99_QUANTILE
from laminar.events.reasons import RewardOutcome
from laminar.storage.rules import TOKEN_BYTES, Row
from laminar.tasks.environments import turns
from laminar.tasks.rewards.results import RewardCall, RewardResult, RewardWorkerLost
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.turns import made_of, prompt_with


class Rewards:
    """The user's reward function, and the workers that run it (actors/scoring.py)."""

    workers_lost = workers_killed = 0

    def __init__(self, model: Idle, rows: Mapping[str, Row]) -> None:
        self._model, self._rows = model, rows

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def compute_rewards(self, call: RewardCall) -> list[RewardResult]:
        model, faults = self._model, self._model.world.faults
        duration_s = model.scenario.world.score_s * model.chance.uniform(0.5, 1.5)
        await asyncio.sleep(duration_s * faults.reward_slow * model.process.slow)
        if faults.loses_reward_worker():
            raise RewardWorkerLost("killed by signal 9")
        tokens = [response for _, response in call.completions]
        if any(response in tokens for response in self._unscorable()):
            return [RewardResult(None, "unscored") for _ in tokens]
        scores = model.scenario.world.scores
        return [_reward(response, scores, faults.reward_reason()) for response in tokens]

    def _unscorable(self) -> list[list[int]]:
        """Return the responses that a fault has made unscorable."""
        world = self._model.world
        found = []
        for trajectory in () if world.faults.healed else sorted(world.faults.unscorable):
            if (row := self._rows.get(trajectory)) is not None:
                made = made_of(world.scenario, world.scenario.seed_of(row))
                data = made.tokens[: TOKEN_BYTES * row.num_tokens]
                found.append(np.frombuffer(data, "<i4").tolist())
        return found


def _reward(tokens: list[int], scores: int, reason: str) -> RewardResult:
    """Return a score below `scores`, the same on every replica; 0 if the function failed."""
    succeeded = reason == RewardOutcome.OK
    score = float(sum(tokens) % scores) if succeeded else 0.0
    return RewardResult(score, reason, "", {"half": score / 2} if succeeded else {})


def _tailed(chance: random.Random, p99_to_median: float) -> float:
    """Draw from a log-normal with median 1, capped at 4 times the p99: calls are killed then."""
    deviation = math.log(p99_to_median) / P99_QUANTILE
    return min(chance.lognormvariate(0.0, deviation), 4 * p99_to_median)


class Sessions:
    """The sessions of one host (actors/turns.py), which end with its process."""

    def __init__(self, model: Idle, rows: Mapping[str, Row]) -> None:
        self._model, self._rows = model, rows
        self._sessions: dict[str, tuple[int, int]] = {}  #: (attempt, turns answered)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reset(self, session: turns.Session) -> turns.NextTurn | None:
        await self._pause()
        self._sessions[session.trajectory_id] = (session.attempt, 0)
        row = session.row.index
        prompt_ids = prompt_with(self._model.scenario, session.purpose, row)
        changed = prompt_ids != make_prompt(session.purpose, row)
        return turns.NextTurn(prompt_ids) if changed else None

    async def answer_turn(
        self, call: turns.TurnCall, intend: Callable[[tuple[turns.Effect, ...]], Awaitable[None]]
    ) -> turns.NextTurn | turns.TrajectoryDone:
        model, session = self._model, call.session
        once = model.scenario.config.env.call_semantics == "at-most-once"
        known, answered = self._sessions.get(session.trajectory_id, (0, 0))
        if known != session.attempt:
            if once and (call.turn or call.stored):
                raise turns.SessionLost("its host has ended")
            self._sessions[session.trajectory_id] = (session.attempt, call.turn)
            answered = call.turn
        row = self._rows[session.trajectory_id]
        made = made_of(model.scenario, model.scenario.seed_of(row))
        if call.turn >= len(made.contexts):
            await self._pause()
            self.end_session(session.trajectory_id)
            return turns.TrajectoryDone(None, f"{row.num_tokens} tokens")
        effect = turns.Effect(0, "ask", "{}", "intended")
        if once and answered == call.turn:
            self._sessions[session.trajectory_id] = (session.attempt, call.turn + 1)
            await intend((effect,))
            model.world.checks.contents.called(session.trajectory_id, session.attempt, call.turn)
        await self._pause()
        return turns.NextTurn(made.contexts[call.turn], (effect._replace(status="done"),))

    def end_session(self, trajectory_id: str) -> None:
        self._sessions.pop(trajectory_id, None)

    async def _pause(self) -> None:
        model, world = self._model, self._model.scenario.world
        answer_s, spread = world.answer_s, world.answer_p99_to_median
        share = _tailed(model.chance, spread) if spread else model.chance.uniform(0.5, 1.5)
        await asyncio.sleep(answer_s * share * model.process.slow)


class HostProcess(Idle):
    """The model of one boot of a host."""

    def __init__(self, process: SimProcess, rows: Mapping[str, Row]) -> None:
        super().__init__(process)
        self.rewards, self._sessions = Rewards(self, rows), Sessions(self, rows)

    def make_actor(self, host: Host) -> ActorRole:
        return AgentHost(host, self)

    async def load_sessions(self) -> Sessions:
        await asyncio.sleep(self.chance.uniform(0, self.scenario.world.start_s))
        if self.world.faults.start_hangs():
            await asyncio.Event().wait()
        return self._sessions

    def decode(self, tokens: list[int]) -> str:
        return f"{len(tokens)} tokens"
