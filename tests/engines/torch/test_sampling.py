"""Counter-based uniforms and the choice of a token from logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laminar.engines.torch.engine import sample_tokens
from laminar.engines.torch.sampling import draw_uniforms

torch.set_num_threads(1)
MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """Return output number `index` (from 0) of the generator that starts at `seed`; a uint64."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draw_uniform(seed: int, position: int) -> float:
    return (splitmix64(seed, position) >> 11) * 2.0**-53


def test_splitmix64_gives_the_published_sequence() -> None:
    # First outputs for seed 1234567 of the reference C implementation (Vigna, public domain).
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(1234567, index) for index in range(5)] == expected


def test_vector_and_scalar_agree_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 500, dtype=np.uint64)
    seeds[:2] = 0, 2**64 - 1
    positions = rng.integers(0, 100_000, 500)
    expected = [draw_uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert draw_uniforms(seeds, positions).tolist() == expected
    assert all(0 <= u < 1 for u in expected)


def test_uniforms_are_uniform_along_positions_and_across_seeds() -> None:
    n = 20_000
    zeros, counter = np.zeros(n, np.int64), np.arange(n)
    for seeds, positions in ((zeros, counter), (counter, zeros)):
        bins = np.bincount((draw_uniforms(seeds.astype(np.uint64), positions) * 20).astype(int))
        assert len(bins) == 20
        assert np.square(bins - n / 20).sum() / (n / 20) < 45  # chi-square, 19 degrees of freedom


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_choose_draws_from_the_tempered_softmax(temperature: float) -> None:
    n, logits = 40_000, torch.tensor([2.0, 0.0, -1.0, 1.5, float("-inf"), 0.3])
    draws = torch.from_numpy(draw_uniforms(np.full(n, 9, np.uint64), np.arange(n)))
    ids, logprobs = sample_tokens(
        logits.expand(n, -1), torch.full((n,), temperature, dtype=torch.float64), draws
    )
    expected = torch.log_softmax(logits / temperature, -1)
    share = torch.bincount(ids, minlength=6) / n
    assert share[4] == 0
    assert torch.allclose(share, expected.exp(), atol=0.01)
    assert torch.allclose(logprobs, expected[ids], atol=1e-6)


def test_choose_at_the_edges_of_the_unit_interval_skips_ids_without_mass() -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf, 1.0, 1.0, -inf]] * 3)
    draws = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    ids, logprobs = sample_tokens(logits, torch.ones(3, dtype=torch.float64), draws)
    assert ids.tolist() == [1, 2, 2]
    assert torch.allclose(logprobs, torch.full((3,), -0.6931472))


def test_choose_mixes_greedy_and_sampled_rows_and_never_gives_positive_logprobs() -> None:
    logits = torch.tensor([[0.0, 50.0, 0.0], [0.0, 3.0, 2.9], [0.0, 3.0, 2.9]])
    temperatures = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)
    ids, logprobs = sample_tokens(logits, temperatures, torch.full((3,), 0.99, dtype=torch.float64))
    assert ids.tolist() == [1, 1, 2]
    assert (logprobs <= 0).all()
    assert logprobs.dtype == torch.float32
    assert logprobs[1] == pytest.approx(torch.log_softmax(logits[1], -1)[1].item(), abs=1e-6)


def test_choose_keeps_the_tail_of_a_large_vocabulary() -> None:
    # One id holds all but 3e-9 of the mass: a float32 sum would never reach the ids behind it.
    logits = torch.full((1, 30_001), -30.0)
    logits[0, 0] = 0.0
    ids, _ = sample_tokens(
        logits, torch.ones(1, dtype=torch.float64), torch.tensor([1 - 1e-9], dtype=torch.float64)
    )
    behind = 30_000 * (1 - 1e-9 / (30_000 * np.exp(-30.0)))
    assert ids.item() == pytest.approx(behind, abs=30)
