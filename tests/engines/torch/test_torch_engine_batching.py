"""Continuous batching: slots, prefixes, limits, aborts and moves change no sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from laminar.engines.protocol import EngineError, GenerateRequest
from laminar.engines.torch.model import CALL_BYTES, DecoderModel
from tests.engines.engine_models import (
    MAX_LEN,
    VOCAB,
    Output,
    build,
    collect,
    engine_of,
    request,
    run_all,
    run_one,
)

MODEL = build("qwen2")


def random_request(rng: random.Random, name: str) -> GenerateRequest:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 30, 70])))
    return request(
        name,
        prompt,
        limit=rng.randrange(1, 60),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        seed=rng.getrandbits(64),
        stop=frozenset({rng.randrange(VOCAB), rng.randrange(VOCAB)}),
    )


def assert_same(got: Output, expected: Output) -> None:
    assert got.tokens == expected.tokens
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert got.reason == expected.reason


@pytest.fixture(params=["one span", "many spans", "rows move"])
def spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How attention cuts the rows; a tiny model alone would always have them in one span."""
    if request.param != "one span":
        monkeypatch.setitem(CALL_BYTES, "cpu", 0)
    if request.param == "rows move":
        monkeypatch.setattr("laminar.engines.spans.MOVE_COST", 0)


@pytest.mark.usefixtures("spans")
def test_a_mixed_batch_gives_each_request_what_it_gets_alone() -> None:
    rng = random.Random(0)
    requests = [random_request(rng, f"r{i}") for i in range(20)]
    together = run_all(engine_of(MODEL, slots=6), *requests)
    alone = engine_of(MODEL, slots=1)
    for item in requests:
        assert_same(together[item.request_id], run_one(alone, item))


@pytest.mark.usefixtures("spans")
def test_random_adds_and_aborts_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.engines.torch.engine.PREFILL_CHUNK", 48)
    rng = random.Random(1)
    engine, alone = engine_of(MODEL, slots=5), engine_of(MODEL, slots=1)
    requests: dict[str, GenerateRequest] = {}
    outputs: dict[str, Output] = {}
    aborted: set[str] = set()
    for turn in range(150):
        if rng.random() < 0.35:
            item = random_request(rng, f"r{turn}")
            requests[item.request_id] = item
            engine.add(item)
        live = [r for r in requests if r not in aborted and not reason_of(outputs, r)]
        if live and rng.random() < 0.15:
            victim = rng.choice(live)
            assert engine.abort_request(victim)
            aborted.add(victim)
        collect(outputs, engine.step())
    while deltas := engine.step():
        collect(outputs, deltas)
    assert len(aborted) > 5
    assert len(requests) - len(aborted) > 20
    for name, item in requests.items():
        expected = run_one(alone, item)
        if name not in aborted:
            assert_same(outputs[name], expected)
        elif name in outputs:
            assert outputs[name].tokens == expected.tokens[: len(outputs[name].tokens)]
    assert engine.get_stats().kv_used_tokens == 0


def test_any_set_of_sequences_may_end_in_the_same_step() -> None:
    engine, names = engine_of(MODEL, slots=5), "abcde"
    prompts = {name: (index, 50, 7 * index) for index, name in enumerate(names)}
    whole = {name: run_one(engine, request(name, prompts[name], limit=8)) for name in names}
    for chosen in range(1 << len(names)):
        limits = {name: 3 if chosen >> i & 1 else 8 for i, name in enumerate(names)}
        items = [request(name, prompts[name], limit=limits[name]) for name in names]
        outputs = run_all(engine, *items)
        for name in names:
            assert outputs[name].tokens == whole[name].tokens[: limits[name]]


def reason_of(outputs: dict[str, Output], name: str) -> str | None:
    return outputs[name].reason if name in outputs else None


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_cut_sequence_continues_elsewhere_with_the_same_tokens(temperature: float) -> None:
    item = request("a", (5, 17, 3, 88), limit=24, temperature=temperature, seed=2**63 + 11)
    whole = run_one(engine_of(MODEL), item)
    elsewhere = engine_of(MODEL)
    resumed = [
        request(
            f"cut {cut}",
            item.prompt_ids,
            done=tuple(whole.tokens[:cut]),
            limit=24,
            temperature=temperature,
            seed=item.seed,
        )
        for cut in range(24)
    ]
    outputs = run_all(elsewhere, *resumed)
    for cut in range(24):
        rest = outputs[f"cut {cut}"]
        assert rest.tokens == whole.tokens[cut:]
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
        assert rest.reason == "length"


def test_a_stop_id_ends_the_response_and_belongs_to_it() -> None:
    engine = engine_of(MODEL)
    whole = run_one(engine, request("a", (1, 2), limit=30))
    stop = whole.tokens[7]
    first = whole.tokens.index(stop)
    out = run_one(engine, request("a", (1, 2), limit=30, stop=frozenset({stop, VOCAB + 5})))
    assert out.tokens == whole.tokens[: first + 1]
    assert out.reason == "stop"


def test_a_stop_id_on_the_last_allowed_token_is_a_stop() -> None:
    engine = engine_of(MODEL)
    token = run_one(engine, request("a", (1, 2), limit=1)).tokens[0]
    out = run_one(engine, request("a", (1, 2), limit=1, stop=frozenset({token})))
    assert out.reason == "stop"


def test_a_row_costs_the_positions_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALL_BYTES, "cpu", 0)
    read: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(q: torch.Tensor, keys: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read.append(keys.shape[0] * keys.shape[2])
        return attend(q, keys, *args, **kwargs)

    engine = engine_of(MODEL, slots=8)
    for row in range(8):
        engine.add(request(f"r{row}", (row,) * (130 if row == 4 else 10), limit=20))
    engine.step()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    engine.step()
    assert sum(read) == 3 * (7 * 64 + 192), "three layers"


class Spy:
    """Records the rows of every prefill."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        original = DecoderModel.prefill_rows

        def prefill(model: DecoderModel, rows: Any, *args: Any) -> Any:
            self.rows += [len(row) for row in rows]
            return original(model, rows, *args)

        monkeypatch.setattr(DecoderModel, "prefill_rows", prefill)


def test_equal_prefixes_are_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    engine = engine_of(MODEL, slots=6)
    long, short = tuple(range(40)), (7, 8, 9)
    requests = [
        request(f"{len(prompt)}.{i}", prompt, seed=i, limit=12 + i)
        for i in range(4)
        for prompt in (short, long)
    ]
    for item in requests:
        engine.add(item)
    outputs: dict[str, Output] = {}
    while deltas := engine.step():  # the seventh and eighth find their prompt still running
        collect(outputs, deltas)
    assert spy.rows == [39, 2]
    alone = engine_of(MODEL, slots=1)
    for item in requests:
        assert_same(outputs[item.request_id], run_one(alone, item))
    assert len({tuple(output.tokens) for output in outputs.values()}) == 8


def test_stats_count_tokens_and_requests() -> None:
    engine = engine_of(MODEL, slots=2)
    assert engine.get_stats().kv_capacity_tokens == 2 * MAX_LEN
    for name in "abc":
        engine.add(request(name, (1, 2, 3), limit=9))
    assert (engine.get_stats().running, engine.get_stats().waiting) == (0, 3)
    engine.step()
    engine.step()
    stats = engine.get_stats()
    assert (stats.running, stats.waiting, stats.kv_used_tokens) == (2, 1, 10)


def test_abort_tells_whether_there_was_something_to_abort() -> None:
    engine = engine_of(MODEL, slots=1)
    for name in "ab":
        engine.add(request(name, (1, 2, 3), limit=2))
    engine.step()
    assert engine.abort_request("b")  # waiting
    assert engine.abort_request("a")  # running
    assert not engine.abort_request("a")
    assert not engine.abort_request("never")
    assert engine.step() == []


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (request("a", ()), "empty prompt"),
        (request("a", (1, VOCAB)), f"token id {VOCAB}"),
        (request("a", (1,), done=(-1,)), "token id -1"),
        (request("a", (1,), limit=MAX_LEN), f"max_model_len = {MAX_LEN}"),
        (request("a", (1,), done=(1, 2), limit=2), "nothing to generate"),
        (request("a", (1,), limit=0), "nothing to generate"),
        (request("a", (1,), done=(4,), stop=frozenset({4})), "already ended"),
        (request("a", (1,), temperature=-0.1), "temperature -0.1"),
        (request("a", (1,), temperature=1e-40), "temperature 1e-40"),
        (request("a", (1,), temperature=float("nan")), "temperature nan"),
        (request("a", (1,), seed=2**64), "seed"),
        (request("taken", (1,)), "already running"),
    ],
)
def test_a_request_that_cannot_run_is_refused(item: GenerateRequest, message: str) -> None:
    engine = engine_of(MODEL)
    engine.add(request("taken", (1,)))
    with pytest.raises(EngineError, match=message):
        engine.add(item)
    assert engine.get_stats().waiting == 1


def test_a_request_may_fill_the_whole_length() -> None:
    out = run_one(engine_of(MODEL), request("a", (1, 2), limit=MAX_LEN - 2))
    assert len(out.tokens) == MAX_LEN - 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_model_len": 257}, "max_position_embeddings = 256"),
        ({"vocab_limit": VOCAB + 1}, "vocab_limit"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine_of(MODEL, **settings)
