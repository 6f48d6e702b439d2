"""Each figure on a timeline that is small enough to work it out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from laminar.analysis.log.intervals import EMPTY, merge_intervals
from laminar.analysis.log.timeline import Steps, TimelineSpan, merge_steps
from laminar.analysis.report import utilization

MS = 1_000_000


def ms(*pairs: tuple[float, float]) -> np.ndarray:
    return merge_intervals([(int(a * MS), int(b * MS)) for a, b in pairs])


def steps(*starts: float, length: float = 1, sequences: int = 1) -> Steps:
    rows = [(int(s * MS), int((s + length) * MS), sequences, sequences) for s in starts]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def test_stepping_joins_gaps_of_20_ms_over_replicas() -> None:
    one, two = steps(0, 100, length=10), steps(30, length=10)
    assert merge_steps([one, two]).tolist() == ms((0, 40), (100, 110)).tolist()


def test_overlap_leaves_out_what_the_bound_forbids() -> None:
    busy, working = ms((0, 100), (200, 300)), ms((50, 100), (190, 230))
    assert utilization.compute_overlap(busy, EMPTY, working) == pytest.approx(80 / 200)
    held_back = ms((0, 40), (230, 260), (100, 200))
    assert utilization.compute_overlap(busy, held_back, working) == pytest.approx(80 / 130)
    assert utilization.compute_overlap(EMPTY, EMPTY, working) is None
    assert utilization.compute_overlap(busy, busy, working) is None


def decoding(gaps: list[float]) -> Steps:
    return steps(*np.concatenate([[0.0], np.cumsum(gaps)]), length=0.5)


def test_decode_gaps_beside_publishes_against_the_others() -> None:
    """30 gaps of 2 ms, then 25 of 5 ms while the trainer publishes: p95 5 against p95 2."""
    rows = decoding([2.0] * 30 + [5.0] * 25)
    whole = {"rollout-0": ms((0, 1000))}
    publishing = ms((60.1, 185))
    ratio = utilization.decode_gap_ratio(
        {"rollout-0": rows}, whole, publishing, {"rollout-0": EMPTY}
    )
    assert ratio == pytest.approx(5 / 2)


def test_only_the_pull_of_another_replica_counts() -> None:
    rows = decoding([2.0] * 30 + [5.0] * 25)
    running = {"rollout-0": ms((0, 1000)), "rollout-1": EMPTY}
    both = {"rollout-0": rows, "rollout-1": steps()}
    pull = ms((60.1, 185))
    own = {"rollout-0": pull, "rollout-1": EMPTY}
    assert utilization.decode_gap_ratio(both, running, EMPTY, own) is None
    others = {"rollout-0": EMPTY, "rollout-1": pull}
    assert utilization.decode_gap_ratio(both, running, EMPTY, others) == pytest.approx(5 / 2)


def test_gaps_without_anything_to_decode_do_not_count() -> None:
    """Five gaps of 500 ms in which the replica was empty, and steps that sampled nothing."""
    rows = decoding([2.0] * 30 + [500.0] * 5 + [4.0] * 30)
    emptied = ms((0, 60.2), (2559, 3000))
    publishing = ms((2559.5, 2679))
    arguments = ({"rollout-0": emptied}, publishing, {"rollout-0": EMPTY})
    assert utilization.decode_gap_ratio({"rollout-0": rows}, *arguments) == pytest.approx(2)
    rows[40:, 2] = 0
    assert utilization.decode_gap_ratio({"rollout-0": rows}, *arguments) is None


def test_fewer_than_twenty_gaps_of_a_kind_are_no_basis() -> None:
    whole, publishing = {"rollout-0": ms((0, 1000))}, ms((60.1, 1000))
    for beside, known in ((19, False), (20, True)):
        rows = {"rollout-0": decoding([2.0] * 30 + [5.0] * beside)}
        ratio = utilization.decode_gap_ratio(rows, whole, publishing, {"rollout-0": EMPTY})
        assert (ratio is not None) is known


def test_publish_stall_is_a_share_of_the_way_to_published_weights() -> None:
    publishes = [(0, 400), (1000, 1600)]
    stalls = merge_intervals([(300, 320), (1500, 1530)])
    assert utilization.publish_stall_share(stalls, publishes) == pytest.approx(50 / 1000)
    assert utilization.publish_stall_share(stalls, []) is None


def span(state: str, start: float, end: float) -> TimelineSpan:
    return TimelineSpan(state, int(start * MS), int(end * MS), -1, -1)


def test_the_trainers_time() -> None:
    """Life 0..1000; the wait from 900 on has no span, because nothing ended it."""
    spans = [
        span("waiting", -50, 100),
        span("fetching", 100, 110),
        span("busy", 110, 400),
        span("publishing", 400, 420),
        span("probe", 420, 430),
        span("saving", 430, 435),
        span("waiting", 440, 700),
        span("exporting", 700, 900),
    ]
    found = utilization.trainer_shares(
        ms((0, 1000)), spans, ms((0, 100), (950, 1000)), ms((900, 1000)), ms((0, 690))
    )
    assert found == pytest.approx(
        {
            "busy": 0.29,
            "fetching": 0.01,
            "publishing": 0.02,
            "probe": 0.01,
            "saving": 0.005,
            "exporting": 0.2,
            "waiting_for_batch": 0.1 + 0.25,
            "waiting_for_evaluation": 0.05,  # from 950: before that the export was outstanding
            "other": 0.005 + 0.01 + 0.05,
        }
    )


def test_a_replicas_time() -> None:
    """Stepping 0..500 (from 300 on below capacity and refused), pulling, held back, nothing."""
    found = utilization.replica_shares(
        ms((0, 1000)), ms((0, 500)), ms((300, 800)), ms((490, 600)), ms((400, 850))
    )
    assert found == pytest.approx(
        {"draining": 0.2, "stepping": 0.3, "pulling": 0.1, "staleness_bound": 0.25, "no_work": 0.15}
    )
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)


def test_a_process_that_was_never_ready_has_no_shares() -> None:
    assert set(utilization.replica_shares(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY).values()) == {0.0}
