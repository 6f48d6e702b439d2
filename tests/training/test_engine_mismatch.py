"""Rows of an engine with other weights than they name: found before a step, and left out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from laminar.storage.rules import TokenSpan
from laminar.training import engine_mismatch, steps
from laminar.training.learner import Learner

Make = Callable[..., Any]
LIMIT = {"algorithm.rollout_correction.mismatch_limit": 1e-3, "optim.lr": 1e-2}
SICK = ("rollout-1", 4)
WELL = ("rollout-0", 4)


def honest(learner: Learner, samples: Sequence[steps.TrainSample]) -> list[steps.TrainSample]:
    """The samples as an engine with the learner's weights would have recorded them."""
    found = []
    for s in samples:
        ids = [*s.prompt_ids.tolist(), *s.response_ids.tolist()]
        scores = learner.compute_logprobs([ids], s.temperature)[0][len(s.prompt_ids) - 1 :]
        found.append(replace(s, logprobs=np.array(scores, np.float32)))
    return found


def sickened(
    samples: Sequence[steps.TrainSample], off: float = 0.3, sick: steps.Origin = SICK
) -> list[steps.TrainSample]:
    """The log-probs of what this origin has sampled are off, wherever it was finished."""
    found = []
    for s in samples:
        offs = [off if steps.get_origin(span) == sick else 0.0 for span in s.spans]
        per_token = np.repeat(np.float32(offs), [span.num_tokens for span in s.spans])
        found.append(replace(s, logprobs=s.logprobs - per_token))
    return found


def is_sick(sample: steps.TrainSample) -> bool:
    return SICK in map(steps.get_origin, sample.spans)


def moved(sample: steps.TrainSample, *origins: steps.Origin) -> steps.TrainSample:
    """The same response, sampled by these in turns of equal length."""
    parts = np.array_split(sample.response_ids, len(origins))
    spans = (
        TokenSpan(*origin, sample.version_step, len(part))
        for origin, part in zip(origins, parts, strict=True)
    )
    return replace(sample, spans=tuple(span for span in spans if span.num_tokens))


def weights(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in learner.policy.model.parameters()]


@pytest.mark.parametrize("minis", [1, 2])
@pytest.mark.parametrize("bypass", [False, True])
def test_a_step_is_what_it_would_be_had_the_bad_rows_never_been_in_the_batch(
    minis: int, bypass: bool, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Baselines, counts and gradient: all are of the rows that remain."""
    config = make_config(
        LIMIT
        | {
            "algorithm.ppo_mini_batch_size": 4 // minis,
            "data.train_batch_size": 4,
            "algorithm.rollout_correction.bypass_mode": bypass,
        }
    )
    with_them, without = (Learner(config, make_policy(0)) for _ in range(2))
    samples = honest(with_them, make_samples(groups=4))
    found = with_them.train_step(sickened(samples), 4)
    expected = without.train_step([s for s in samples if not is_sick(s)], 4)
    assert all(map(torch.equal, weights(with_them), weights(without)))
    assert found.updates == expected.updates and found.changed
    assert found.metrics["actor/entropy"] == expected.metrics["actor/entropy"]
    assert list(found.suspects) == [SICK]
    assert found.left_out == {s.sample_id: (SICK,) for s in samples if is_sick(s)}
    assert found.suspects[SICK].diff == pytest.approx(0.3, abs=1e-4)
    assert found.metrics["mismatch/left_out"] == len(found.left_out)
    assert found.mismatch.keys() == {steps.get_origin(s.spans[0]) for s in samples}
    assert found.digest != expected.digest, "it was consumed"


def test_a_batch_of_bad_rows_only_changes_nothing(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    learner = Learner(make_config(LIMIT | {"optim.weight_decay": 0.1}), make_policy())
    learner.train_step(honest(learner, make_samples(seed=1)), 4)
    before = weights(learner)
    samples = make_samples(source=(*SICK, 5))
    result = learner.train_step(sickened(honest(learner, samples)), 5)
    assert (result.changed, result.skipped_reason) == (False, steps.MISMATCH)
    assert all(map(torch.equal, weights(learner), before))
    assert len(result.left_out) == len(samples) and result.metrics["mismatch/moved"] == 0
    assert all(math.isfinite(v) for v in result.metrics.values())
    honest_ones = honest(learner, make_samples(source=("rollout-0", 5, 5)))
    assert learner.train_step(honest_ones, 6).left_out == {}


@pytest.mark.parametrize("minis", [1, 2])
def test_a_bad_source_is_found_and_not_who_finished_its_rows(
    minis: int, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """It has sampled the first half of some rows; the other replica has sampled the rest of them,
    and whole rows, which are trained."""
    keys = {"algorithm.ppo_mini_batch_size": 4 // minis, "data.train_batch_size": 4}
    with_them, without = (Learner(make_config(LIMIT | keys), make_policy(0)) for _ in range(2))
    samples = honest(with_them, make_samples(groups=4, source=(*WELL, 4)))
    parted = [moved(s, SICK, WELL) if i % 3 == 0 else s for i, s in enumerate(samples)]
    found = with_them.train_step(sickened(parted), 4)
    assert list(found.suspects) == [SICK]
    assert found.left_out == {s.sample_id: (SICK,) for s in parted if is_sick(s)} != {}
    assert found.suspects[SICK].diff == pytest.approx(0.3, abs=1e-4)
    assert found.mismatch[WELL].mean_abs_diff < 1e-5
    for origin in (SICK, WELL):
        spans = [span for s in parted for span in s.spans if steps.get_origin(span) == origin]
        assert found.mismatch[origin].tokens == sum(span.num_tokens for span in spans)
    without.train_step([s for s in parted if not is_sick(s)], 4)
    assert all(map(torch.equal, weights(with_them), weights(without)))


def test_a_row_that_two_bad_sources_sampled_names_both(
    make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Only the second sampled another row; one between them in the first is no suspect."""
    other = ("rollout-2", 4)
    learner = Learner(make_config(LIMIT), make_policy())
    samples = honest(learner, make_samples(groups=2, siblings=2, source=(*WELL, 4)))
    longest = max(range(4), key=lambda i: len(samples[i].response_ids))
    parted = [moved(s, SICK, WELL, other) if i == longest else s for i, s in enumerate(samples)]
    parted[longest - 1] = moved(parted[longest - 1], other)
    found = learner.train_step(sickened(sickened(parted), sick=other), 4)
    assert found.left_out == {
        parted[longest].sample_id: (SICK, other),
        parted[longest - 1].sample_id: (other,),
    }
    assert set(found.suspects) == {SICK, other}


@pytest.mark.parametrize("lr", [1e-4, 1e-3, 1e-2])
def test_rows_may_be_as_far_off_as_the_trainer_has_moved_since(
    lr: float, make_policy: Make, make_config: Make, make_samples: Make
) -> None:
    """Three steps late, whatever a step is; rows of the newest weights may not."""
    learner = Learner(make_config(LIMIT | {"optim.lr": lr}), make_policy())
    old = honest(learner, make_samples(source=("rollout-0", 0, 0)))
    for step in range(3):
        fresh = make_samples(seed=step + 1, source=("rollout-0", step, step))
        assert learner.train_step(honest(learner, fresh), step).left_out == {}
    newest = [
        replace(s, spans=(TokenSpan(f"rollout-{i % 2}", 3, 3, len(s.response_ids)),))
        for i, s in enumerate(old)
    ]
    ids = [replace(s, sample_id=f"x{s.sample_id}", group_id=f"x{s.group_id}") for s in newest]
    result = learner.train_step([*old, *ids], 3)
    drift = result.mismatch["rollout-0", 0].mean_abs_diff
    assert drift > engine_mismatch.ROUNDING["float32"]
    assert set(result.suspects) == {("rollout-0", 3), ("rollout-1", 3)}


def test_a_limit_is_rounding_and_what_the_steps_since_have_moved() -> None:
    limits = engine_mismatch.MismatchLimits(0.01)
    for step, distance in ((0, 0.1), (1, 0.0), (2, 0.2)):
        limits.moved[step] = distance
    tokens, siblings, doubt = 10_000, 4.0, 0.25
    few = 1 + engine_mismatch.FEW_TOKENS / math.sqrt(tokens / siblings)
    expected = {
        0: (0.01 + engine_mismatch.MOVEMENT_FACTOR * 0.3 * doubt) * few,
        1: (0.01 + engine_mismatch.MOVEMENT_FACTOR * 0.2 * doubt) * few,
        2: (0.01 + engine_mismatch.MOVEMENT_FACTOR * 0.2 * doubt) * few,
        3: 0.01 * few,
    }
    for made, limit in expected.items():
        for diff, is_suspect in (
            (limit * 0.999, False),
            (limit * 1.001, True),
            (math.nan, False),
            (math.inf, False),
        ):
            figure = {("rollout-0", 7): steps.Mismatch(diff, 0.0, doubt, tokens)}
            found = limits.find_suspects(figure, {7: made}, {("rollout-0", 7): siblings}, 3)
            assert bool(found) is is_suspect
            if found:
                assert found == {("rollout-0", 7): steps.MismatchSource(diff, pytest.approx(limit))}


def suspected(
    limits: engine_mismatch.MismatchLimits,
    diff: float,
    tokens: int,
    made: int,
    siblings: float = 1.0,
    doubt: float = 1.0,
) -> bool:
    """At step 2."""
    origin = ("rollout-0", 7)
    figure = {origin: steps.Mismatch(diff, 0.0, doubt, tokens)}
    return bool(limits.find_suspects(figure, {7: made}, {origin: siblings}, 2))


def test_few_tokens_and_an_unknown_step_prove_nothing() -> None:
    limits = engine_mismatch.MismatchLimits(0.01)
    limits.moved[1] = 0.0
    assert not suspected(limits, 0.04, 1, made=2)
    assert suspected(limits, 0.04, 1_000, made=2)
    assert not suspected(limits, 9.0, 1_000, made=0)


def test_the_first_tokens_of_siblings_prove_little(make_samples: Make) -> None:
    """As in a clean run in flight: eight siblings had sampled twelve tokens when weights came, and
    two steps had moved all tokens by 0.0032 on average, the first one of this prompt by more."""
    limits = engine_mismatch.MismatchLimits(engine_mismatch.ROUNDING["float32"])
    limits.moved[0] = 0.0016
    limits.moved[1] = 0.0016
    assert not suspected(limits, 0.0352, 12, made=0, siblings=8.0)
    assert suspected(limits, 0.0352, 12, made=0)
    assert suspected(limits, 0.0352, 240, made=0, siblings=8.0)


def of_doubt(sample: steps.TrainSample, doubt: float) -> steps.TrainSample:
    return replace(sample, logprobs=np.full_like(sample.logprobs, math.log1p(-doubt)))


def updated(
    parts: Sequence[Sequence[steps.TrainSample]], pull: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens before and after an update, which pulls them down by their doubt."""
    told = [torch.from_numpy(s.logprobs).double() for part in parts for s in part]
    before = torch.cat(told)
    return before, before + pull * before.expm1()


def test_a_step_that_moves_what_is_in_doubt_is_measured_there(make_samples: Make) -> None:
    """A model that is sure of 61 rows of 64 moves in the others: rows evenly from all of them are
    sure ones, and honest rows of the next step, of a prompt that it doubts, would be suspected."""
    rows, pull = make_samples(groups=8, siblings=8), 0.5
    doubted = {5, 23, 46}
    rows = [of_doubt(s, 0.3 if i in doubted else 1e-3) for i, s in enumerate(rows)]
    parts = engine_mismatch.movement_rows(rows, tokens=10**6)
    before, after = updated(parts, pull)
    assert {rows[i].sample_id for i in doubted} < {s.sample_id for s in parts[0]}
    assert [len(part) for part in parts] == [engine_mismatch.MOVEMENT_ROWS // 2] * 2
    assert engine_mismatch.measure_movement(parts, before, after) == pytest.approx(pull, rel=1e-6)
    before, after = updated([rows], pull)
    moves = [float(m.mean()) for m in (before - after).split([len(s.response_ids) for s in rows])]
    assert np.mean(moves[::8]) < np.mean(moves) / 10

    limits = engine_mismatch.MismatchLimits(engine_mismatch.ROUNDING["float32"])
    limits.moved[1] = pull
    honest_diff = pull * 0.3
    assert honest_diff > engine_mismatch.MOVEMENT_FACTOR * np.mean(moves)
    assert not suspected(limits, honest_diff, 200, made=1, siblings=8.0, doubt=0.3)
    assert suspected(limits, honest_diff, 200, made=1, siblings=8.0, doubt=1e-3)


def test_rows_that_are_scored_again_fit_in_a_pass(make_samples: Make) -> None:
    rows = make_samples(groups=8, siblings=4)
    few = engine_mismatch.movement_rows(rows, tokens=100)
    assert all(1 < len(part) < engine_mismatch.MOVEMENT_ROWS // 2 for part in few)
    assert all(sum(s.length for s in part) <= 50 for part in few)
    assert [len(part) for part in engine_mismatch.movement_rows(rows, tokens=1)] == [1, 1]
    assert [len(part) for part in engine_mismatch.movement_rows(rows[:3], tokens=100)] == [3]
    assert engine_mismatch.movement_rows([], tokens=100) == []


def test_the_part_that_has_moved_furthest_counts(make_samples: Make) -> None:
    """Tokens that the model was sure of, by more for their doubt than those that it was not."""
    rows = make_samples(groups=4, siblings=8)
    parts = engine_mismatch.movement_rows(
        [of_doubt(s, 0.6 if i < 8 else 0.1) for i, s in enumerate(rows)], tokens=10**6
    )
    before, slow = updated(parts, 0.1)
    _, fast = updated(parts, 0.4)
    split = sum(len(s.response_ids) for s in parts[0])
    after = torch.cat([slow[:split], fast[split:]])
    assert engine_mismatch.measure_movement(parts, before, after) == pytest.approx(0.4, rel=1e-6)


def test_tokens_without_doubt_have_not_moved_far(make_samples: Make) -> None:
    parts = [make_samples(groups=1)]
    sure = torch.zeros(sum(len(s.response_ids) for s in parts[0]), dtype=torch.float64)
    assert (
        engine_mismatch.measure_movement(parts, sure, sure)
        == 0.0
        == engine_mismatch.measure_movement([], sure[:0], sure[:0])
    )
    assert engine_mismatch.measure_movement(parts, sure, sure - 1e-7) == pytest.approx(1e-3)
    assert engine_mismatch.measure_movement(parts, sure + 1e-7, sure) == pytest.approx(1e-3)


def test_siblings_are_counted_by_origin(make_samples: Make) -> None:
    samples = make_samples(groups=2, siblings=3, source=(*WELL, 4))
    sick = [replace(s, spans=(TokenSpan(*SICK, 4, len(s.response_ids)),)) for s in samples]
    both = [sick[i] if i in (0, 1, 3, 4) else s for i, s in enumerate(samples)]
    assert engine_mismatch.count_siblings(both) == {SICK: 2.0, WELL: 1.0}


@pytest.mark.parametrize(
    ("keys", "compute", "rounding"),
    [
        ({}, torch.float32, engine_mismatch.ROUNDING["float32"]),
        ({}, torch.bfloat16, engine_mismatch.ROUNDING["bfloat16"]),
        ({"weights.dtype": "bfloat16"}, torch.float32, engine_mismatch.ROUNDING["bfloat16"]),
        ({"rollout.dtype": "bfloat16"}, torch.float32, engine_mismatch.ROUNDING["bfloat16"]),
        ({"algorithm.rollout_correction.mismatch_limit": 0.02}, torch.bfloat16, 0.02),
    ],
)
def test_the_less_precise_side_decides_the_rounding(
    keys: dict[str, Any], compute: torch.dtype, rounding: float, make_config: Make
) -> None:
    unset = {"algorithm.rollout_correction.mismatch_limit": 0.0}
    assert engine_mismatch.get_rounding(make_config(unset | keys), compute) == rounding
