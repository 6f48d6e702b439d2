"""A replica's parts in virtual time: an engine driven by a clock, rewards and weights.

Reads   lengths of responses, arenas, checkpoints; whether a fault strikes
Gives   Replica, the ReplicaParts of actors/rollout.py

Tokens are those of the trajectory's seed (tools/simulator/turns.py), so a response that several
replicas sampled in turn can be compared with the response of a single replica.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import numpy as np

from laminar.actors.host import ActorRole, Host
from laminar.actors.rollout import Rollout
from laminar.engines.emulated.clock_engine import ClockEngine, EmulatedResponse
from laminar.engines.emulated.fake_tokens import END_ID, make_prompt
from laminar.engines.emulated.timing import P99_QUANTILE
from laminar.engines.protocol import GenerateRequest, KvOnUpdate, TokenDelta, WeightSource
from laminar.events.reasons import RewardOutcome
from laminar.names import exit_codes
from laminar.storage.rules import TOKEN_BYTES, Row
from laminar.tasks.environments import turns
from laminar.tasks.rewards.results import RewardCall, RewardResult, RewardWorkerLost
from tools.simulator.machine.memory import Arenas, ReachableWeights
from tools.simulator.machine.versions import PROBE_LOGPROB, ModelDirectory
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.scenario import seconds
from tools.simulator.turns import begin_of, made_of, prompt_with

DIES_S = 0.1  #: time until a poisonous prompt kills the replica that runs it


class ReplicaEngine(ClockEngine):
    """The interface of engines/protocol.py, with hooks for the simulator's checks and faults."""

    def __init__(self, replica: Replica, on_deltas: Callable[[list[TokenDelta]], None]) -> None:
        self._replica = replica
        scenario, self._sim_loop = replica.scenario, replica.process.current.loop
        self.digest = ""  #: digest of the loaded weights
        self.streams = False  #: whether weights are arriving and nothing is sampled yet
        self._streamed: list[GenerateRequest] = []  #: requests added before their weights arrived
        super().__init__(
            replica.process,
            scenario.engine,
            slots=scenario.config.rollout.max_num_seqs,
            kv_capacity=scenario.world.kv_capacity,
            on_deltas=on_deltas,
            on_ends=partial(self._sim_loop.enter, on_deltas),
        )

    def add(self, request: GenerateRequest) -> asyncio.Future[None]:
        replica, scenario = self._replica, self._replica.scenario
        world, faults = replica.world, replica.world.faults
        command = replica.process.current.placed[request.request_id]
        if self.streams:
            self._streamed.append(request)
        else:
            world.checks.generates(command, self.digest, request.prompt_ids)
        world.checks.contents.begun(command)
        response = EmulatedResponse(
            request, scenario.lengths.draw_length(request.seed), faults.hangs(command)
        )
        if faults.poisonous(command):
            world.checks.poisoned(command, replica.process.node)
            replica.process.call_later(seconds(DIES_S), replica.process.die, exit_codes.KILLED)
        else:
            response.spoiled = faults.refuses(command)
            self.clock.add(response)
        return self._make_done_future()

    def abort_request(self, request_id: str) -> asyncio.Future[bool]:
        response = self.clock.sequences.get(request_id)
        aborted = super().abort_request(request_id)
        if response is not None:
            assert isinstance(response, EmulatedResponse)
            self._replica.world.checks.released.stopped(request_id, response.sent)
        return aborted

    def load(
        self, source: WeightSource, on_update: KvOnUpdate | None = None
    ) -> asyncio.Future[None]:
        refused, self.digest = self._begin_load(on_update), ""
        self.streams = False
        if refused is not None:
            return self._make_done_future(refused)
        replica = self._replica
        duration_s = replica.scenario.world.load_s * replica.chance.uniform(0.5, 1.5)
        loaded: asyncio.Future[None] = self._loop.create_future()
        enter = self._sim_loop.enter
        replica.process.compute(duration_s, enter, self._loaded, loaded, source, on_update)
        return loaded

    def expect_weights(self) -> asyncio.Future[None]:
        self.digest, self.streams = "", True
        self._streamed.clear()
        return super().expect_weights()

    def load_partial(self, source: WeightSource, num_bytes: int) -> asyncio.Future[None]:
        if num_bytes == source.nbytes:
            self.digest = self._replica.weights.digest_of(source)
        return self._make_done_future()

    def resume_sampling(self) -> asyncio.Future[None]:
        self.streams, replica = False, self._replica
        for request in self._streamed:
            if request.request_id in self.clock.sequences:
                command = replica.process.current.placed[request.request_id]
                replica.world.checks.generates(command, self.digest, request.prompt_ids)
        return super().resume_sampling()

    def _loaded(
        self, loaded: asyncio.Future[None], source: WeightSource, on_update: KvOnUpdate | None
    ) -> None:
        if not loaded.done():
            self.digest = self._replica.weights.digest_of(source)
            self._end_load(on_update)
            loaded.set_result(None)

    def _build_delta(self, response: EmulatedResponse, end: int, reason: str | None) -> TokenDelta:
        command = self._replica.process.current.placed[response.id]
        contents = self._replica.world.checks.contents
        begin = begin_of(self._replica.scenario, command.seed, response.seed)
        contents.sampled(command, begin + response.sent, begin + end, self.digest)
        return super()._build_delta(response, end, reason)

    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]]
    ) -> asyncio.Future[list[list[float]]]:
        scores: asyncio.Future[list[list[float]]] = self._loop.create_future()
        scores.set_result([[PROBE_LOGPROB] * (len(sequence) - 1) for sequence in sequences])
        return scores


class Rewards:
    """The user's reward function, and the workers that run it (actors/scoring.py)."""

    workers_lost = workers_killed = 0

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def compute_rewards(self, call: RewardCall) -> list[RewardResult]:
        replica, faults = self._replica, self._replica.world.faults
        duration_s = replica.scenario.world.score_s * replica.chance.uniform(0.5, 1.5)
        await asyncio.sleep(duration_s * faults.reward_slow * replica.process.slow)
        if faults.loses_reward_worker():
            raise RewardWorkerLost("killed by signal 9")
        tokens = [response for _, response in call.completions]
        if any(response in tokens for response in self._unscorable()):
            return [RewardResult(None, "unscored") for _ in tokens]
        scores = replica.scenario.world.scores
        return [_reward(response, scores, faults.reward_reason()) for response in tokens]

    def _unscorable(self) -> list[list[int]]:
        """Return the responses that a fault has made unscorable."""
        world = self._replica.world
        found = []
        for trajectory in () if world.faults.healed else sorted(world.faults.unscorable):
            if (row := self._replica.rows.get(trajectory)) is not None:
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


class Environments:
    """The sessions of one replica (actors/turns.py), which end with its process."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._sessions: dict[str, tuple[int, int]] = {}  #: (attempt, turns answered)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reset(self, session: turns.Session) -> turns.NextTurn | None:
        await self._pause()
        self._sessions[session.trajectory_id] = (session.attempt, 0)
        row = session.row.index
        prompt_ids = prompt_with(self._replica.scenario, session.purpose, row)
        changed = prompt_ids != make_prompt(session.purpose, row)
        return turns.NextTurn(prompt_ids) if changed else None

    async def answer_turn(
        self, call: turns.TurnCall, intend: Callable[[tuple[turns.Effect, ...]], Awaitable[None]]
    ) -> turns.NextTurn | turns.TrajectoryDone:
        replica, session = self._replica, call.session
        once = replica.scenario.config.env.call_semantics == "at-most-once"
        known, answered = self._sessions.get(session.trajectory_id, (0, 0))
        if known != session.attempt:
            if once and (call.turn or call.stored):
                raise turns.SessionLost("its replica has ended")
            self._sessions[session.trajectory_id] = (session.attempt, call.turn)
            answered = call.turn
        row = replica.rows[session.trajectory_id]
        made = made_of(replica.scenario, replica.scenario.seed_of(row))
        if call.turn >= len(made.contexts):
            await self._pause()
            self.end_session(session.trajectory_id)
            return turns.TrajectoryDone(None, f"{row.num_tokens} tokens")
        effect = turns.Effect(0, "ask", "{}", "intended")
        if once and answered == call.turn:
            self._sessions[session.trajectory_id] = (session.attempt, call.turn + 1)
            await intend((effect,))
            replica.world.checks.contents.called(session.trajectory_id, session.attempt, call.turn)
        await self._pause()
        return turns.NextTurn(made.contexts[call.turn], (effect._replace(status="done"),))

    def end_session(self, trajectory_id: str) -> None:
        self._sessions.pop(trajectory_id, None)

    async def _pause(self) -> None:
        replica, world = self._replica, self._replica.scenario.world
        answer_s, spread = world.answer_s, world.answer_p99_to_median
        share = _tailed(replica.chance, spread) if spread else replica.chance.uniform(0.5, 1.5)
        await asyncio.sleep(answer_s * share * replica.process.slow)


class Replica(Idle):
    """The model of one boot of a replica."""

    stop_ids = frozenset({END_ID})

    def __init__(
        self,
        process: SimProcess,
        arenas: Arenas,
        models: Mapping[str, ModelDirectory],
        rows: Mapping[str, Row],
    ) -> None:
        super().__init__(process)
        self.rows, self.rewards = rows, Rewards(self)
        self.weights = ReachableWeights(process, self.chance, arenas, models)
        self.environments = Environments(self) if process.world.config.env.path else None
        self.engine: ReplicaEngine | None = None

    def make_actor(self, host: Host) -> ActorRole:
        return Rollout(host, self)

    async def start_engine(
        self, seed: int, on_deltas: Callable[[list[TokenDelta]], None]
    ) -> ReplicaEngine:
        await asyncio.sleep(self.chance.uniform(0, self.scenario.world.start_s))  # even if slow
        if self.world.faults.start_hangs():
            await asyncio.Event().wait()
        self.engine = ReplicaEngine(self, on_deltas)
        return self.engine

    def decode(self, tokens: list[int]) -> str:
        return f"{len(tokens)} tokens"

    def record_steps(self, rows: bytes) -> None:
        """Do nothing: engine steps are not read here."""

    def pause(self) -> None:
        if self.engine is not None:
            self.engine.clock.freeze_time()

    def resume(self) -> None:
        if self.engine is not None:
            self.engine.clock.resume_time()
