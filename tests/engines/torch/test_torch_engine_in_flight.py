"""Weights that change while sequences run: each token is sampled, and recorded, by the weights of
its load, on a cache that was kept or made again; and nothing else of a sequence changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from laminar.engines.protocol import EngineError, GenerateRequest, KvOnUpdate, TokenDelta
from laminar.engines.torch.engine import TorchEngine
from laminar.engines.torch.model import CALL_BYTES
from tests.engines.engine_models import FAMILIES, VOCAB, build, engine_of, request
from tools.kit.plain_forward import sampled_logprobs

BOTH: tuple[KvOnUpdate, ...] = ("keep", "recompute")
MODEL, OTHER = build("qwen2"), build("qwen2", seed=1)
PROMPT = (5, 17, 3, 60, 8, 44, 2, 9)


@dataclass
class Answer:
    """What came of a request, and after which load each token of it was sampled."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    reason: str | None = None

    def worst(self, models: dict[int, Any], on_update: KvOnUpdate = "recompute") -> float:
        """The largest difference to the log-probs of plain forward passes."""
        expected = sampled_logprobs(
            models,
            self.request.prompt_ids,
            self.tokens,
            self.loads,
            on_update,
            temperature=self.request.temperature or 1.0,
        )
        return max(abs(a - b) for a, b in zip(self.logprobs, expected, strict=True))


class Engine:
    """A torch engine, its answers, and the model of each load."""

    def __init__(self, model: Any, slots: int = 8) -> None:
        self.torch: TorchEngine = engine_of(model, slots)
        self.models: dict[int, Any] = {1: model}
        self.answers: dict[str, Answer] = {}

    def add(self, item: GenerateRequest) -> None:
        self.answers[item.request_id] = Answer(item)
        self.torch.add(item)

    def load(self, model: Any, on_update: KvOnUpdate) -> None:
        self.models[len(self.models) + 1] = model
        self.torch.load_weights(model.named_parameters(), on_update)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for delta in self.torch.step():
                self._take(delta)

    def to_the_end(self) -> None:
        while self.torch.get_stats().running + self.torch.get_stats().waiting:
            self.steps(1)

    def _take(self, delta: TokenDelta) -> None:
        answer = self.answers[delta.request_id]
        assert answer.reason is None, "a delta after the end"
        answer.tokens += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.loads += [delta.load] * len(delta.token_ids)
        answer.reason = delta.finish_reason


@pytest.fixture(params=["one span", "rows move"])
def spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How attention and prefill cut the rows; with a tiny model they would stay where they are."""
    if request.param == "rows move":
        monkeypatch.setitem(CALL_BYTES, "cpu", 0)
        monkeypatch.setattr("laminar.engines.spans.MOVE_COST", 0)
        monkeypatch.setattr("laminar.engines.torch.engine.PREFILL_CHUNK", 48)


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, 12) for family in FAMILIES),
        *(pytest.param(family, 170, marks=pytest.mark.long) for family in FAMILIES),
    ],
)
def test_recomputed_each_token_has_the_log_prob_of_a_plain_forward_with_its_weights(
    family: str, changes: int
) -> None:
    """Sequences come, go and wait for a slot between the changes; each load meets some that run."""
    rng = random.Random(7)
    models = [build(family, seed) for seed in range(3)]
    engine = Engine(models[0], slots=5)
    changed_at = []
    for turn in range(changes):
        while engine.torch.get_stats().running + engine.torch.get_stats().waiting < rng.choice(
            [4, 7]
        ):
            engine.add(drawn(rng, f"r{len(engine.answers)}"))
        engine.steps(rng.randrange(1, 4))
        changed_at.append(engine.torch.get_stats().running)
        engine.load(models[(turn + 1) % 3], "recompute")
    engine.to_the_end()
    assert min(changed_at) > 0
    spanning = [answer for answer in engine.answers.values() if len(set(answer.loads)) > 2]
    assert len(spanning) > len(engine.answers) / 3
    assert all(answer.loads == sorted(answer.loads) for answer in engine.answers.values())
    assert {load for a in engine.answers.values() for load in a.loads} == set(engine.models)
    assert max(answer.worst(engine.models) for answer in engine.answers.values()) < 1e-4


def drawn(rng: random.Random, name: str) -> GenerateRequest:
    """Some have the prompt of others, as the siblings of a group."""
    same = rng.random() < 0.4
    prompt = PROMPT if same else tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50)))
    return request(
        name,
        prompt,
        limit=rng.randrange(5, 60),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        seed=rng.getrandbits(64),
    )


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize("changes", [8, pytest.param(100, marks=pytest.mark.long)])
def test_kept_the_old_cache_is_read_and_what_is_recorded_is_what_was_sampled_from(
    changes: int,
) -> None:
    """Keys and values of a token are those of the weights that read it, and of no others."""
    rng = random.Random(3)
    models = [MODEL, OTHER, build("qwen2", seed=2)]
    engine = Engine(MODEL, slots=5)
    for turn in range(changes):
        while engine.torch.get_stats().running + engine.torch.get_stats().waiting < rng.choice(
            [4, 7]
        ):
            engine.add(drawn(rng, f"r{len(engine.answers)}"))
        engine.steps(rng.randrange(1, 4))
        engine.load(models[(turn + 1) % 3], "keep")
    engine.to_the_end()
    answers = engine.answers.values()
    assert max(answer.worst(engine.models, "keep") for answer in answers) < 1e-4
    assert max(answer.worst(engine.models) for answer in answers) > 0.1, "weights too much alike"


@pytest.mark.parametrize("on_update", BOTH)
def test_a_new_sibling_begins_with_a_prompt_read_by_the_present_weights(
    on_update: KvOnUpdate,
) -> None:
    engine = Engine(MODEL)
    engine.add(request("old", PROMPT, limit=60))
    engine.steps(3)
    engine.load(OTHER, on_update)
    engine.add(request("new", PROMPT, limit=30, seed=2))
    engine.steps(2)
    engine.add(request("sibling of new", PROMPT, limit=30, seed=3))
    engine.to_the_end()
    for name in ("new", "sibling of new"):
        assert set(engine.answers[name].loads) == {2}
        assert engine.answers[name].worst(engine.models) < 1e-4


@pytest.mark.parametrize(("on_update", "prefills"), [("keep", 1), ("recompute", 0)])
def test_a_prompt_is_read_again_only_where_its_cache_was_kept(
    on_update: KvOnUpdate, prefills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(MODEL)
    engine.add(request("old", PROMPT, limit=60))
    engine.steps(3)
    engine.load(OTHER, on_update)
    rows = prefilled(engine, monkeypatch)
    engine.add(request("new", PROMPT, seed=2))
    engine.add(request("newer", PROMPT, seed=3))
    engine.steps(1)
    assert len(rows) == prefills


def prefilled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows that are prefilled from here on."""
    model, rows = engine.torch._model, []
    prefill = model.prefill_rows

    def noted(given: Any, first: int, chunk: int) -> Iterator[Any]:
        rows.extend(given)
        yield from prefill(given, first, chunk)

    monkeypatch.setattr(model, "prefill_rows", noted)
    return rows


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize("on_update", BOTH)
def test_a_probe_disturbs_no_running_sequence(on_update: KvOnUpdate) -> None:
    """All slots are taken; what is scored is longer than what runs, and of more rows."""
    with_probe, without = Engine(MODEL, slots=4), Engine(MODEL, slots=4)
    probe = [[(7 * row + i) % VOCAB for i in range(90)] for row in range(6)]
    expected = engine_of(OTHER).compute_logprobs(probe)
    for engine in (with_probe, without):
        for row in range(4):
            engine.add(request(f"r{row}", PROMPT[row:], limit=40 + row, seed=row))
        engine.steps(9)
        engine.load(OTHER, on_update)
        if engine is with_probe:
            for ours, theirs in zip(engine.torch.compute_logprobs(probe), expected, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
        engine.to_the_end()
    assert with_probe.answers == without.answers


def test_the_same_weights_in_mid_answer_change_nothing() -> None:
    """What was drawn at each position is drawn again: nothing but the weights decides."""
    answers = []
    for changes in (0, 5):
        engine = Engine(MODEL)
        for row in range(3):
            engine.add(request(f"r{row}", PROMPT[row:], limit=30 + 9 * row, seed=row))
        for change in range(changes):
            engine.steps(4)
            engine.load(MODEL, BOTH[change % 2])
        engine.to_the_end()
        answers.append(engine.answers)
    for name, answer in answers[0].items():
        assert answers[1][name].tokens == answer.tokens
        assert answers[1][name].logprobs == pytest.approx(answer.logprobs, abs=1e-4)


@pytest.mark.parametrize("on_update", BOTH)
def test_after_a_load_that_fails_nothing_runs_until_another(on_update: KvOnUpdate) -> None:
    engine = Engine(MODEL, slots=2)
    for row in range(3):
        engine.add(request(f"r{row}", PROMPT, seed=row))
    engine.steps(2)
    tensors = dict(OTHER.named_parameters())
    del tensors["model.norm.weight"]
    with pytest.raises(EngineError, match=r"model\.norm\.weight is missing"):
        engine.torch.load_weights(tensors.items(), on_update)
    stats = engine.torch.get_stats()
    assert (stats.running, stats.waiting) == (0, 0) and not engine.torch.abort_request("r0")
    engine.models[2] = None
    engine.load(OTHER, on_update)
    engine.add(request("after", PROMPT))
    engine.to_the_end()
    assert engine.answers["after"].worst(engine.models) < 1e-4
