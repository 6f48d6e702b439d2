"""Several processes train as one does: the same gradient, the same decisions, the same figures."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from laminar.training.model.packing import build_passes
from laminar.training.ranks import RankLayout, Ranks, assign_sequences
from tools.kit import rank_cases
from tools.kit.extras import needs_peft
from tools.kit.rank_cases import CPU, LAYOUTS, make_samples
from tools.kit.rank_group import RankGroup

LIMIT = 1e-12  #: of two ways to add up the same numbers in float64
LONG = (70, 4, 3, 5, 4, 6, 3, 5)
"""The first is one rank's only sequence, while others need several passes for theirs."""
SUSPECT = {"algorithm.rollout_correction.mismatch_limit": 1.5}
MINI = {"data.train_batch_size": 3, "algorithm.ppo_mini_batch_size": 1}
PPO = {"algorithm.adv_estimator": "gae", "algorithm.lam": 0.9, "algorithm.gamma": 0.98}
KL = {"algorithm.use_kl_loss": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tied": ({}, {}, {}),
    "untied, KL": (KL, {}, {"tied": False}),
    "mini-batches": (MINI | {"algorithm.entropy_coeff": 0.01}, {}, {}),
    "empty passes": ({"trainer.micro_batch_tokens": 20}, {"lengths": LONG}, {}),
    "masked, a suspect": (SUSPECT | {"algorithm.truncated": "mask"}, {"wrong": ("rollout-1",)}, {}),
    "rows without advantage": ({"trainer.micro_batch_tokens": 20}, {"flat": (0,)}, {}),
    "a mini-batch without signal": (MINI, {"flat": (1,)}, {}),
    "recomputed": (
        {"trainer.activation_checkpointing": "on", "trainer.logit_chunk_tokens": 7},
        {},
        {"tied": False},
    ),
    "adapters, KL": (KL | {"lora.rank": 3, "trainer.micro_batch_tokens": 30}, {}, {}),
    "critic, mini-batches, masked, empty passes": (
        PPO | MINI | {"algorithm.truncated": "mask", "trainer.micro_batch_tokens": 20},
        {"lengths": LONG},
        {},
    ),
    "critic, adapters, offload, recomputed": (
        PPO | {"lora.rank": 2, "trainer.activation_checkpointing": "on"},
        {},
        {"offload": True, "tied": False},
    ),
    "offload": (KL | {"trainer.activation_checkpointing": "on"}, {}, {"offload": True}),
    "several passes": ({"trainer.micro_batch_tokens": 12}, {}, {}),
}
HSDP, FULL = RankLayout(2, 2, "node"), RankLayout(2, 2, "all")
QUICK: tuple[int | RankLayout, ...] = (3, HSDP)
MORE: tuple[int | RankLayout, ...] = (1, 2, 4, *(each for each in LAYOUTS if each.size <= 4))


def flat(gradient: dict[str, Any]) -> Any:
    return np.concatenate([gradient[name].ravel() for name in sorted(gradient)])


def apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative distance of two gradients, which have the same names; what is in front of a slash
    in a name is compared by itself."""
    assert found.keys() == expected.keys()
    kinds = {name.rpartition("/")[0] for name in expected}
    parts = [[_of_kind(gradient, kind) for gradient in (found, expected)] for kind in kinds]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in parts)


def _of_kind(gradient: dict[str, Any], kind: str) -> Any:
    return flat({n: tensor for n, tensor in gradient.items() if n.rpartition("/")[0] == kind})


def step_of(
    name: str, ranks: RankGroup | None, size: int | RankLayout = 1, planted: str = ""
) -> Any:
    settings, rows, options = CASES[name]
    samples = make_samples(**rows)
    if ranks is None:
        return rank_cases.gradient(None, settings, samples, tied=options.get("tied", True))
    return ranks.call(size, "gradient", settings, samples, planted=planted, **options)


@pytest.mark.parametrize("sizes", [QUICK, pytest.param(MORE, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[needs_peft] if "adapters" in n else []) for n in CASES]
)
def test_ranks_have_the_gradient_and_the_figures_of_one_process(
    name: str, sizes: tuple[int | RankLayout, ...], ranks: RankGroup
) -> None:
    result, gradient = step_of(name, None)
    assert result.changed and np.linalg.norm(flat(gradient)) > 0
    assert bool(result.left_out) == ("suspect" in name)
    for size in sizes:
        for found, gradient_found in step_of(name, ranks, size):
            assert apart(gradient_found, gradient) <= LIMIT, size
            assert (found.left_out, found.digest) == (result.left_out, result.digest)
            assert found.metrics == pytest.approx(result.metrics, rel=1e-6, abs=1e-9)
            assert found.mismatch.keys() == result.mismatch.keys()
            norms = [u.grad_norm for u in result.updates]
            assert [u.grad_norm for u in found.updates] == pytest.approx(norms, rel=LIMIT)


@pytest.mark.long
def test_six_ranks_on_two_nodes_have_the_gradient_of_one_process() -> None:
    with closing(RankGroup(size=6)) as ranks:
        for name in [name for name in CASES if "adapters" not in name]:
            _, gradient = step_of(name, None)
            for layout in (each for each in LAYOUTS if each.size == 6):
                for _, found in step_of(name, ranks, layout):
                    assert apart(found, gradient) <= LIMIT, (name, layout)


@pytest.mark.parametrize(
    ("planted", "name", "size"),
    [
        ("averaged", "tied", 2),
        ("averaged", "tied", HSDP),
        ("counts of a rank", "tied", 2),
        ("values of a rank", "critic, mini-batches, masked, empty passes", 2),
        ("gradient of a node", "tied", HSDP),
        ("gradient of a pass", "several passes", HSDP),
    ],
)
def test_a_gradient_that_depends_on_the_ranks_is_seen(
    planted: str, name: str, size: int | RankLayout, ranks: RankGroup
) -> None:
    _, gradient = step_of(name, None)
    for _, found in step_of(name, ranks, size, planted):
        assert apart(found, gradient) > 0.01


@pytest.mark.parametrize("more", [{}, MINI, PPO])
def test_nodes_exchange_a_gradient_once_for_each_update(
    more: dict[str, Any], ranks: RankGroup
) -> None:
    """However many passes it takes; a rank sends what it has of the model, padded."""
    for budget in (1000, 12):
        settings = more | {"trainer.micro_batch_tokens": budget}
        for layout in (HSDP, RankLayout(4, 1, "node")):
            found = ranks.call(layout, "count_exchanged", settings, make_samples())
            if more is not MINI:  # else a rank has one row of each update
                assert [passes > 1 for _, _, passes in found] == [budget == 12] * 4
            model = sum(parameters for _, parameters, _ in found) // layout.nodes
            sent = sum(elements for elements, _, _ in found) // layout.nodes
            updates = 3 if more is MINI else 1
            assert updates * model <= sent < 1.05 * updates * model


def test_suspects_that_each_rank_finds_for_itself_are_seen(ranks: RankGroup) -> None:
    """Of four rows as long as each other rank 0 has the first and the third: each rank has one
    suspect, and what they add up over all ranks has one size."""
    settings = SUSPECT | {"trainer.micro_batch_tokens": 1000}
    samples = make_samples(lengths=(8, 8, 8, 8), wrong=("rollout-0", "rollout-1"), replicas=4)
    expected, gradient = rank_cases.gradient(None, settings, samples)
    assert len(expected.left_out) == 2
    for found, gradient_found in ranks.call(2, "gradient", settings, samples):
        assert found.left_out == expected.left_out
        assert apart(gradient_found, gradient) <= LIMIT
    planted = ranks.call(2, "gradient", settings, samples, planted="suspects of a rank")
    assert all(apart(found, gradient) > 0.01 for _, found in planted)


def test_shares_are_whole_and_balanced_by_tokens() -> None:
    lengths = [9, 3, 12, 7, 1, 5, 8, 2]
    found = assign_sequences(lengths, 3)
    assert sorted(i for share in found for i in share) == list(range(8))
    tokens = [sum(lengths[i] for i in share) for share in found]
    assert max(tokens) - min(tokens) <= 1
    assert assign_sequences([5], 3) == [[0], [], []]


@pytest.mark.parametrize("prompts_once", [True, False])
def test_all_ranks_have_equally_many_passes(prompts_once: bool) -> None:
    samples = make_samples(lengths=LONG)
    found = [
        build_passes(samples, 20, CPU, prompts_once=prompts_once, ranks=Ranks(rank, 3))
        for rank in range(3)
    ]
    assert len(set(map(len, found))) == 1
    micros = [micro for own in found for micro in own]
    assert any(micro.empty for micro in micros)
    ids = [i for micro in micros if not micro.empty for i in micro.sample_ids]
    assert sorted(ids) == sorted(s.sample_id for s in samples)
