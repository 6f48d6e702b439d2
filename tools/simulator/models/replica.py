"""A replica's parts in virtual time: an engine driven by a clock, and weights.

Reads   lengths of responses, arenas, checkpoints; whether a fault strikes
Gives   Replica, the ReplicaParts of actors/rollout.py

Tokens are those of the trajectory's seed (tools/simulator/turns.py), so a response that several
replicas sampled in turn can be compared with the response of a single replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from laminar.actors.host import ActorRole, Host
from laminar.actors.rollout import Rollout
from laminar.engines.emulated.clock_engine import ClockEngine, EmulatedResponse
from laminar.engines.emulated.fake_tokens import END_ID
from laminar.engines.protocol import GenerateRequest, KvOnUpdate, TokenDelta, WeightSource
from laminar.names import exit_codes
from laminar.storage.rules import Row
from tools.simulator.machine.memory import Arenas, ReachableWeights
from tools.simulator.machine.versions import PROBE_LOGPROB, ModelDirectory
from tools.simulator.models.agents import Rewards
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.scenario import seconds
from tools.simulator.turns import begin_of

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
        self.rewards = Rewards(self, rows)
        self.weights = ReachableWeights(process, self.chance, arenas, models)
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
            self.engine.clock.advance_to_now()

    def resume(self) -> None:
        if self.engine is not None:
            self.engine.clock.resume_time()
