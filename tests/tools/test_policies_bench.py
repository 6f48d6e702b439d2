"""The benches of policies: their constants have a source, and every run is held to what it says."""

from __future__ import annotations

import pytest

from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from tools.bench.paper import systems as paper
from tools.bench.repack.in_flight import InFlight
from tools.bench.repack.measures import Meter, Setup
from tools.bench.repack.world import RepackWorld

SETUP = Setup(
    replicas=3,
    staleness=2,
    policy="gain",
    max_batch=16,
    timing=EngineTiming(20_000, 50, 20_000, 0.02, 40_000),
    lengths=ResponseLengths(300, 5_000),
    seed=1,
    warm_steps=3,
    steps=4,
    slots=128,
    groups_per_step=12,
    start_s=20.0,
    train_s=5.0,
)


@pytest.mark.parametrize(
    "entry",
    [
        "value = 1",
        'value = 1\nsource = "read"',
        'value = 1\nsource = "read"\nnote = ""',
        'value = 1\nnote = "somewhere"',
        'value = 1\nsource = "known"\nnote = "somewhere"',
    ],
)
def test_a_constant_without_a_source_is_refused(entry: str) -> None:
    with pytest.raises(SystemExit, match=r"speed: give it a source"):
        paper.constants(f"[speed]\n{entry}\n")


def test_the_constants_have_sources() -> None:
    assert paper.constants(paper.CONSTANTS.read_text())["batch"] == 8_192


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_in_flight_keep_the_bound_and_every_token(recompute: bool) -> None:
    """A long tail, so that the oldest group binds; both are checked as the run goes."""
    seen = InFlight(SETUP, recompute).run()
    assert seen.staleness_group_max == SETUP.staleness
    assert seen.staleness_token_mean < seen.staleness_group_mean
    drained = RepackWorld(SETUP).run()
    assert drained.staleness_group_max <= SETUP.staleness


def test_recomputing_the_cache_is_paid_for() -> None:
    keep, recompute = (InFlight(SETUP, mode).run() for mode in (False, True))
    assert recompute.prefilled > keep.prefilled
    assert recompute.seconds > keep.seconds


def test_a_group_that_is_too_old_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="staleness 3 is trained, bound 2"):
        Meter(SETUP).chosen([0, 3], 10, 12.0)


def test_tokens_that_nobody_has_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="0 tokens sampled, 0 trained, 5 live"):
        Meter(SETUP).seen(0, InFlight(SETUP).batches, 5)


@pytest.mark.parametrize("system", ["synchronous", "one-step"])
def test_a_batch_that_lost_a_token_is_an_error(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine ends one answer of the batch before its last token."""

    class Forgets(TimedBatch):
        def add(self, sequence_id: str, prompt: int, done: int, total: int, now: float) -> None:
            super().add(sequence_id, prompt, done, total - (sequence_id == "3"), now)

    monkeypatch.setattr(paper, "totals", lambda model, seed: (40, 30, 20, 10) * 128)
    run = paper.Run("32B", 32, system)
    assert run.batches()["trained_per_s"] > 0
    monkeypatch.setattr(paper, "TimedBatch", Forgets)
    with pytest.raises(RuntimeError, match="12799 tokens sampled, 12800 trained, 0 live"):
        run.batches()
