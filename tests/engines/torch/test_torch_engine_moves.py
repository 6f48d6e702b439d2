"""Trajectories that move between two engines of the same weights are those of one that stayed."""

from __future__ import annotations

import os
import random

import pytest

from laminar.engines.protocol import GenerateRequest
from laminar.engines.torch.engine import TorchEngine
from tests.engines.engine_models import VOCAB, Output, build, collect, engine_of, request, run_all

MODEL = build("qwen2")
MOVES = int(os.environ.get("LAMINAR_TEST_MOVES", "200"))  #: more of them by hand
RUNNING = 6  #: of both together; more than one of them has slots for


class Pair:
    """Two engines with the same weights, and the trajectories that are on either of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.engines = [engine_of(MODEL, slots=5), engine_of(MODEL, slots=5)]
        self.whole: dict[str, GenerateRequest] = {}
        self.places: dict[str, int] = {}  #: of those that have not ended
        self.outputs: dict[str, Output] = {}
        self.moves = 0

    def begin(self) -> None:
        rng, name = self.rng, f"t{len(self.whole)}"
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 30])))
        temperature = rng.choice([0.0, 0.7, 1.0])
        item = request(
            name,
            prompt,
            limit=rng.randrange(20, 100),
            temperature=temperature,
            seed=rng.getrandbits(64),
        )
        self.whole[name], self.outputs[name] = item, Output()
        self.places[name] = rng.randrange(2)
        self.engines[self.places[name]].add(item)

    def move(self, name: str) -> None:
        source = self.places[name]
        assert self.engines[source].abort_request(name)
        item, done = self.whole[name], self.outputs[name].tokens
        self.places[name] = 1 - source
        self.engines[1 - source].add(
            request(
                name,
                item.prompt_ids,
                done=tuple(done),
                limit=item.max_new_tokens,
                temperature=item.temperature,
                seed=item.seed,
            )
        )
        self.moves += 1

    def step(self, engine: TorchEngine) -> None:
        deltas = engine.step()
        collect(self.outputs, deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                del self.places[delta.request_id]


def test_moves_change_no_token() -> None:
    """One at a time or all that an engine runs, before the first token, while they wait for a slot
    and later; the other engine may be at any step."""
    rng = random.Random(3)
    pair = Pair(rng)
    while pair.moves < MOVES or pair.places:
        while pair.moves < MOVES and len(pair.places) < RUNNING:
            pair.begin()
        pair.step(rng.choice(pair.engines))
        if pair.moves < MOVES and pair.places and rng.random() < 0.2:
            source = pair.places[rng.choice(list(pair.places))]
            there = [name for name, place in pair.places.items() if place == source]
            for name in there if rng.random() < 0.3 else [rng.choice(there)]:
                pair.move(name)
    stayed = run_all(engine_of(MODEL), *pair.whole.values())
    for name, moved in pair.outputs.items():
        expected = stayed[name]
        assert moved.tokens == expected.tokens
        assert moved.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert moved.reason == expected.reason
