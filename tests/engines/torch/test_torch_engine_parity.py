"""The torch engine computes what transformers computes, for every family."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from laminar.engines.torch.sampling import draw_uniforms
from tests.engines.engine_models import (
    FAMILIES,
    MAX_LEN,
    VOCAB,
    build,
    engine_of,
    hf_logprobs,
    request,
    run_one,
)

PROMPT = (5, 17, 3, 88, 41, 2, 9)
model_of = functools.cache(build)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str) -> None:
    model: Any = model_of(family)
    # Long enough to cross the rounding of the cache length and, for llama, the original length.
    got = run_one(engine_of(model), request("a", PROMPT, limit=140, temperature=0.0)).tokens
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=140, do_sample=False, pad_token_id=0
    )
    assert got == expected[0, len(PROMPT) :].tolist()
    assert len(set(got)) > 3, "a degenerate model proves nothing"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_logprobs_follow_the_tempered_softmax(family: str, temperature: float) -> None:
    model: Any = model_of(family)
    out = run_one(
        engine_of(model), request("a", PROMPT, limit=80, temperature=temperature, seed=77)
    )
    logprobs = hf_logprobs(model, [*PROMPT, *out.tokens], temperature)
    positions = len(PROMPT) + np.arange(len(out.tokens))
    draws = draw_uniforms(np.full(len(positions), 77, np.uint64), positions)
    for index, (token, logprob) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        position = len(PROMPT) + index
        row = logprobs[position - 1]
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        cumulative = row.double().exp().cumsum(-1).numpy()
        draw = draws[index] * cumulative[-1]
        # The draw lies in the token's own interval, up to the rounding of float32 logits.
        assert (cumulative[token - 1] if token else 0.0) - 1e-5 <= draw <= cumulative[token] + 1e-5
    assert len(set(out.tokens)) > 3


def test_greedy_logprobs_are_of_temperature_one() -> None:
    model: Any = model_of("qwen2")
    out = run_one(engine_of(model), request("a", PROMPT, limit=30, temperature=0.0))
    logprobs = hf_logprobs(model, [*PROMPT, *out.tokens], 1.0)
    expected = [logprobs[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(out.tokens)]
    assert out.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_score_equals_a_plain_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.engines.torch.engine.SCORE_CHUNK", 64)
    model: Any = model_of(family)
    rng = np.random.default_rng(1)
    lengths = [1, 2, 130, MAX_LEN, 7, 64, 65, 33, 12, 100]  # more than slots, chunks cut anywhere
    sequences = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    scores = engine_of(model, slots=4).compute_logprobs(sequences)
    for ids, row in zip(sequences, scores, strict=True):
        logprobs = hf_logprobs(model, ids, 1.0)
        expected = [logprobs[i, token].item() for i, token in enumerate(ids[1:])]
        assert row == pytest.approx(expected, abs=1e-4)


def test_vocab_limit_leaves_the_ids_out_of_the_distribution() -> None:
    model: Any = model_of("qwen2")
    limit = 40
    engine = engine_of(model, vocab_limit=limit)
    prompt = (5, 17, 3)
    out = run_one(engine, request("a", prompt, limit=100, temperature=1.3))
    assert max(out.tokens) < limit
    ids = [*prompt, *out.tokens]
    logprobs = hf_logprobs(model, ids, 1.3, limit)
    expected = [logprobs[2 + i, token].item() for i, token in enumerate(out.tokens)]
    assert out.logprobs == pytest.approx(expected, abs=1e-4)
    plain = hf_logprobs(model, ids, 1.0, limit)
    expected = [plain[i, token].item() for i, token in enumerate(ids[1:])]
    assert engine.compute_logprobs([ids])[0] == pytest.approx(expected, abs=1e-4)


def test_bfloat16_stays_close_to_float32() -> None:
    model: Any = model_of("qwen3")
    ids = np.random.default_rng(2).integers(0, VOCAB, 60).tolist()
    exact = engine_of(model).compute_logprobs([ids])[0]
    half = engine_of(model, dtype=torch.bfloat16)
    assert half.compute_logprobs([ids])[0] == pytest.approx(exact, abs=0.5)
    out = run_one(half, request("a", tuple(ids[:20]), limit=20))
    assert out.logprobs == pytest.approx(
        half.compute_logprobs([ids[:20] + out.tokens])[0][19:], abs=0.2
    )
