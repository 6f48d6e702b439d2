"""The probe: text of the run's prompts, and what its differences say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laminar.actors.trainer import PROBE_LENGTH, PROBE_SEQUENCES, probe_sequences
from laminar.actors.weight_loader import (
    ProbeDifference,
    find_probe_failure_reason,
    probe_difference,
)
from laminar.weights.version import manifest as mf


def prompt(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_the_probe_is_the_text_of_the_prompts_in_pieces() -> None:
    prompts = [prompt(*range(start, start + 20)) for start in range(0, 1_000, 20)]
    pieces = probe_sequences(prompts, 1_000)
    tokens = [token for piece in pieces for token in piece]
    assert tokens == list(range(PROBE_SEQUENCES * PROBE_LENGTH))
    assert {len(piece) for piece in pieces} == {PROBE_LENGTH}


@pytest.mark.parametrize(
    ("prompts", "longest", "pieces"),
    [
        ([prompt(7)], 100, [[7, 7]]),
        ([prompt(1, 2, 3), prompt(4, 5)], 3, [[1, 2, 3], [4, 5]]),
        ([prompt(1, 2, 3)], 2, [[1, 2]]),
        ([], 100, [[0, 0]]),
    ],
)
def test_a_piece_has_two_tokens_and_fits_the_engine(
    prompts: list[bytes], longest: int, pieces: list[list[int]]
) -> None:
    assert probe_sequences(prompts, longest) == pieces


class Scorer:
    """An engine whose scores are off by what it is told."""

    def __init__(self, *off: float) -> None:
        self.off = off

    async def compute_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0 + off for off in self.off] for _ in sequences]


@pytest.mark.parametrize(
    ("off", "failure"),
    [
        ((0.05, -0.05, 0.05, 0.05), ""),
        ((0.0, 0.0, 0.0, 0.39), ""),
        ((0.11, -0.11, 0.11, -0.11), "0.11 on average, more than 0.1"),
        ((0.0, 0.0, 0.0, -0.4001), "on average|at one"),
        ((0.0, math.nan, 0.0, 0.0), "inf on average"),
    ],
)
async def test_the_mean_shows_a_wrong_tensor_and_the_largest_a_wrong_row(
    off: tuple[float, ...], failure: str
) -> None:
    """The sign of a difference is no matter, and what is no number is the worst of all."""
    probe = mf.Probe(
        sequences=((1, 2, 3, 4, 5),), logprobs=((-1.0,) * 4,), tolerance=0.39, mean_tolerance=0.1
    )
    found = await probe_difference(Scorer(*off), probe)  # type: ignore[arg-type]
    said = find_probe_failure_reason(found, probe)
    if not math.isnan(sum(off)):  # the engine is off by x: exp(-x) - 1 + x
        assert found.mean_k3 == pytest.approx(sum(math.exp(-x) - 1 + x for x in off) / 4)
    assert bool(said) is bool(failure)
    if "|" not in failure:
        assert failure in (said or "")


def test_one_token_may_be_off_by_more_than_the_mean_and_no_more_than_its_limit() -> None:
    probe = mf.Probe(sequences=((1, 2),), logprobs=((-1.0,),), tolerance=1.0, mean_tolerance=0.1)
    assert find_probe_failure_reason(ProbeDifference(0.1, 1.0), probe) is None
    assert "at one token, more than 1" in find_probe_failure_reason(
        ProbeDifference(0.05, 1.01), probe
    )
