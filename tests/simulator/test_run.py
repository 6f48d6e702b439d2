"""Runs of the simulator: they end, they depend on their seed alone, and they say what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO

import pytest

from laminar.core.state.statuses import Phase
from laminar.training.steps import TrainSample
from tests.hash_seeds import printed_under
from tools.kit.sim_worlds import PACKED, calm, config, list_differences, ran
from tools.simulator.config import FAULTS
from tools.simulator.run import make_world, run_seed, run_seeds, story
from tools.simulator.runtime.violation import Violation

SHORT = {"replicas": 4, "num_train": 20, "total_training_steps": 3, "seconds": 20.0}
SEEDS = (4, 6)
PRINT_LOGS = f"""
from hashlib import sha256
from tools.kit.sim_worlds import config, log_bytes, ran

for seed in {SEEDS}:
    files = log_bytes(ran(config(**{SHORT}), seed))
    print(seed, [(name, sha256(data).hexdigest()) for name, data in sorted(files.items())])
"""


def test_run_without_faults_completes_its_work() -> None:
    world = ran(calm(total_training_steps=6, num_train=200), seed=3)
    state = world.coordinator.state
    assert state is not None and state.run.phase == Phase.ENDED and not state.run.failure
    assert state.steps.completed == 6
    assert len(world.checks.training.book) == state.work.ledger.trajectories.trained > 0
    assert world.coordinator.incarnations == 1


def test_same_seed_same_log_in_every_process() -> None:
    """Every byte of every file, snapshots included, with faults of all kinds: in this process,
    which has run others, and in new ones. Their string hashes differ; nothing may depend on them.
    """
    with redirect_stdout(StringIO()) as here:
        exec(PRINT_LOGS, {})
    assert printed_under(("0", "1"), PRINT_LOGS) == {here.getvalue()}
    first, second = (line.partition(" ")[2] for line in here.getvalue().splitlines())
    assert len(first) > 100 and first != second, "another seed is another run"


def test_faults_of_one_kind_do_not_shift_the_work() -> None:
    """What a scenario is, and how long its answers are, does not depend on what goes wrong."""
    quiet, rough = make_world(calm(), 5), make_world(config("replica-dies"), 5)
    differing = list_differences(quiet.scenario, rough.scenario)
    assert differing and all(key.startswith(FAULTS) for key in differing)


def test_runs_in_processes_are_the_same_runs() -> None:
    alone = {outcome.seed: outcome for outcome in run_seeds(calm(**SHORT), range(5, 8), 1)}
    together = {outcome.seed: outcome for outcome in run_seeds(calm(**SHORT), range(5, 8), 2)}
    assert alone == together


def test_violation_is_an_outcome_with_a_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's book is broken on purpose: the outcome names the promise and what was hurt,
    and the story tells of nothing else."""

    def broken(checks: object, step: int, samples: Sequence[TrainSample]) -> None:
        hurt = samples[0].sample_id
        raise Violation("at_most_one_trained", f"{hurt} is in two batches", hurt)

    monkeypatch.setattr("tools.simulator.checks.training.TrainingChecks.batch_fetched", broken)
    outcome = run_seed(calm(), 8)
    assert outcome.invariant == "at_most_one_trained" and outcome.digest == ""
    (hurt,) = outcome.subjects
    told = story(calm(), outcome)
    assert any("trajectory-started" in line and hurt in line for line in told)
    decided = [line for line in told if "-> " in line[:24]]
    assert decided and all(hurt in line for line in decided)
    assert "train-step" in decided[-1]


def test_what_the_product_raises_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(relay: object, boot_id: str, body: bytes) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("laminar.actors.relay.Relay._answer_request", broken)
    outcome = run_seed(calm(), 8)
    assert outcome.invariant == "nothing_raises" and "planted" in outcome.details
    assert story(calm(), outcome), "without a subject the last events are told"


def test_engines_with_a_small_cache_keep_every_promise() -> None:
    """Some lose their cache, many wait, and nothing else changes."""
    limited = {"cache_tokens": 800, "token_us": 2.0, "max_response_length": 600}
    world = ran(calm(**SHORT, **limited), seed=4)
    engines = [p.model.engine.clock.batch for p in world.rollouts]  # type: ignore[attr-defined]
    assert sum(batch.preempted for batch in engines) > 10
    outcomes = list(run_seeds(config(**SHORT, **limited), range(1, 4), 1))
    assert [outcome.invariant for outcome in outcomes] == ["", "", ""]


Answers = list[tuple[str, int, str]]
"""Of each row: its id, its tokens, how it ended."""


def answers_by_seed(policy: str) -> tuple[list[Answers], int]:
    """Of runs with the same data; and how many trajectories moved."""
    data = {"num_train": 40, "total_training_steps": 0, "drop_last": False, "val_size": 0}
    data |= {"batch_timeout_s": 600.0, "prefill_tokens_per_step": 5_000}
    worlds = [ran(calm(**{**PACKED, **data, "policy": policy}), seed) for seed in range(1, 5)]
    answers = [
        sorted((row.id, row.num_tokens, row.end or "") for row in world.rows.values())
        for world in worlds
    ]
    return answers, sum(w.coverage.counts.get("move:releasing-migrate", 0) for w in worlds)


@pytest.fixture(scope="module")
def answers_that_stayed() -> list[Answers]:
    answers, moved = answers_by_seed("off")
    assert not moved
    return answers


@pytest.mark.parametrize("policy", ["gain", pytest.param("best-fit", marks=pytest.mark.long)])
def test_what_moves_is_generated_as_if_it_had_stayed(
    policy: str, answers_that_stayed: list[Answers]
) -> None:
    """Weights change nothing here: every trajectory of the data has the same length and end, if no
    batch waits for so long that one begins again."""
    answers, moved = answers_by_seed(policy)
    assert answers == answers_that_stayed
    assert moved > 0
