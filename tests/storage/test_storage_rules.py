"""The rules alone: rows in, verdicts out."""

from __future__ import annotations

import math
import struct

import pytest

from laminar.storage import rules
from laminar.storage.rules import Chunk, Row
from tools.kit.store_samples import floats, ints

ASKED = Row(
    "0.0.0", "0.0", 0, "train", 7, attempt=1, placement=3,
    replica="rollout-1", weight_version=5, version_step=4, temperature=0.7,
)  # fmt: skip
HELD = ASKED._replace(segments=1, segment_tokens=2, num_tokens=2)
OTHER = rules.Source("rollout-7", 5, 4)
CHUNK = Chunk(0, 2, ints(1, 2), floats(-1, -2), HELD.source)


@pytest.mark.parametrize(
    ("changes", "answer", "change"),
    [
        ({"placement": 2}, "fenced", "none"),
        ({"placement": 2, "attempt": 9}, "fenced", "none"),
        ({"placement": 3}, "open", "none"),
        ({"placement": 4}, "open", "move"),
        ({"placement": 4, "attempt": 2}, "open", "restart"),
        ({"placement": 4, "attempt": 2, "weight_version": 9, "version_step": 8}, "open", "restart"),
        ({"placement": 3, "attempt": 2}, "refused", "none"),
        ({"placement": 4, "attempt": 0}, "refused", "none"),
        ({"placement": 4, "weight_version": 6}, "refused", "none"),
        ({"placement": 4, "version_step": 5}, "refused", "none"),
        ({"placement": 4, "temperature": 1.0}, "refused", "none"),
        ({"placement": 4, "row_index": 8}, "refused", "none"),
        ({"placement": 4, "purpose": "eval"}, "refused", "none"),
    ],
)
def test_who_may_open_an_unfinished_trajectory(changes, answer, change):
    verdict = rules.judge_open(HELD, ASKED._replace(**changes))
    assert (verdict.answer, verdict.change) == (answer, change)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "open"),
        ({"weight_version": 7, "version_step": 6}, "open"),
        ({"weight_version": 4, "version_step": 3}, "refused"),
        ({"weight_version": 7, "version_step": 3}, "refused"),
        ({"weight_version": 7, "version_step": 6, "temperature": 1.0}, "refused"),
    ],
)
def test_in_flight_newer_weights_go_on_with_the_tokens_of_older_ones(changes, answer):
    for placement in (3, 4):  # a request may come twice
        asked = ASKED._replace(placement=placement, **changes)
        assert rules.judge_open(HELD, asked, in_flight=True).answer == answer
    if answer == "open":
        assert rules.apply_open(HELD, "move", asked) == HELD._replace(placement=4)


@pytest.mark.parametrize(
    ("version", "step", "purpose", "in_flight", "taken"),
    [
        (5, 4, "train", False, True),
        (7, 6, "train", True, True),
        (7, 6, "train", False, False),
        (7, 6, "eval", True, False),
        (5, 4, "eval", True, True),
        (4, 3, "train", True, False),
        (7, 3, "train", True, False),
    ],
)
def test_tokens_are_of_the_rows_weights_or_in_flight_of_newer(
    version, step, purpose, in_flight, taken
):
    chunk = CHUNK._replace(source=rules.Source("rollout-1", version, step))
    verdict = rules.judge_append(HELD._replace(purpose=purpose), 3, chunk, None, in_flight)
    assert verdict.changes is taken, verdict


def test_a_row_keeps_the_first_and_the_last_weights():
    of_7 = CHUNK._replace(source=rules.Source("rollout-1", 7, 6))
    assert rules.apply_append(HELD, CHUNK).last_version is None
    grown = rules.apply_append(HELD, of_7)
    assert (grown.source[1:], grown.latest) == ((5, 4), (7, 6))
    older = rules.judge_append(grown, 3, CHUNK._replace(offset=4), None, in_flight=True)
    assert older.answer == "refused" and "older than version 7 (step 6)" in older.reason
    first = rules.apply_append(ASKED, of_7._replace(offset=0))  # it was opened before the load
    assert (first.source[1:], first.latest) == ((7, 6), (7, 6))


@pytest.mark.parametrize("status", ["generated", "rewarded"])
def test_a_finished_response_is_kept_even_from_a_new_attempt(status):
    held = HELD._replace(status=status)
    asked = ASKED._replace(placement=4, attempt=2, weight_version=9, replica="rollout-2")
    verdict = rules.judge_open(held, asked)
    assert verdict == (status, "move", "")
    assert rules.apply_open(held, verdict.change, asked) == held._replace(
        placement=4, replica="rollout-2"
    )
    assert rules.judge_open(held, ASKED) == (status, "none", "")


def test_an_ended_trajectory_opens_for_nobody():
    held = HELD._replace(end="dropped", end_reason="batch-timeout", end_step=1)
    assert rules.judge_open(held, ASKED._replace(placement=9)).answer == "ended"
    assert rules.judge_open(held, ASKED).answer == "ended"
    assert rules.judge_open(held, ASKED._replace(placement=2)).answer == "fenced"


def test_a_move_keeps_the_tokens_and_a_restart_counts_them_as_lost():
    asked = ASKED._replace(placement=4, attempt=2, weight_version=9, replica="rollout-2")
    held = HELD._replace(tokens_lost=10)
    moved = rules.apply_open(held, "move", asked)
    assert moved == held._replace(placement=4, replica="rollout-2")
    assert rules.apply_open(held, "restart", asked) == asked._replace(tokens_lost=12)


def test_an_attempt_without_tokens_may_move_to_another_version():
    asked = ASKED._replace(placement=4, weight_version=6, version_step=5)
    assert rules.judge_open(ASKED, asked) == ("open", "move", "")
    assert rules.apply_open(ASKED, "move", asked) == asked
    assert rules.judge_open(ASKED, asked._replace(placement=3)).answer == "refused"


@pytest.mark.parametrize(
    ("row", "placement", "answer"),
    [(HELD, 3, "ok"), (HELD, 2, "fenced"), (HELD, 4, "refused"), (None, 3, "refused")],
)
def test_only_the_holder_writes(row, placement, answer):
    assert rules.judge_append(row, placement, CHUNK, None).answer == answer
    assert rules.judge_finish(row, placement, "stop", 2).answer == answer
    generated = row and row._replace(status="generated", finish_reason="stop")
    assert rules.judge_reward(generated, placement, 1.0, "", "").answer == answer


@pytest.mark.parametrize(
    ("segment", "offset", "accepted"),
    [(0, 2, True), (1, 0, False), (0, 3, False), (0, 0, False), (1, 1, False), (2, 0, False)],
)
def test_chunks_follow_one_another(segment, offset, accepted):
    """The next segment is of the turn after an answer."""
    chunk = CHUNK._replace(segment=segment, offset=offset)
    assert rules.judge_append(HELD, 3, chunk, None).changes is accepted
    answered = HELD._replace(turns=1)
    assert rules.judge_append(answered, 3, CHUNK._replace(segment=1, offset=0), None).changes
    assert not rules.judge_append(answered, 3, CHUNK._replace(segment=2, offset=0), None).changes


def test_an_earlier_segment_is_closed():
    held = HELD._replace(segments=2, segment_tokens=1, num_tokens=3, turns=1)
    assert not rules.judge_append(held, 3, CHUNK, None).changes
    assert rules.judge_append(held, 3, CHUNK._replace(segment=1, offset=1), None).changes


def test_the_same_chunk_again_is_a_repeat_and_another_one_is_refused():
    stored = CHUNK._replace(offset=0)
    for row in (HELD, HELD._replace(status="generated"), HELD._replace(end="dropped")):
        assert rules.judge_append(row, 3, stored, stored) == ("ok", "", False)
    other = stored._replace(tokens=ints(1, 3))
    assert rules.judge_append(HELD, 3, other, stored).answer == "refused"
    other = stored._replace(logprobs=floats(-1, -2.5))
    assert rules.judge_append(HELD, 3, other, stored).answer == "refused"
    assert rules.judge_append(HELD, 3, stored._replace(offset=1), None).answer == "refused"


@pytest.mark.parametrize("changes", [{"status": "generated"}, {"end": "dropped"}])
def test_nothing_new_after_the_response_is_whole_or_ended(changes):
    assert rules.judge_append(HELD._replace(**changes), 3, CHUNK, None).answer == "refused"


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        (b"", b""),
        (ints(1)[:3], floats(-1)[:3]),
        (ints(1, 2), floats(-1)),
        (ints(1), floats(-1, -1)),
        (ints(-1), floats(-1)),
        (ints(1, 2), floats(-1, math.nan)),
        (ints(1), floats(-math.inf)),
        (ints(1), floats(math.inf)),
        (ints(1), floats(2e-6)),
    ],
)
def test_bytes_that_are_no_sampled_tokens(tokens, logprobs):
    chunk = Chunk(0, 2, tokens, logprobs, HELD.source)
    verdict = rules.judge_append(HELD, 3, chunk, None)
    assert verdict.answer == "refused" and verdict.reason and not verdict.changes


def test_a_log_prob_may_be_rounded_just_above_zero():
    chunk = Chunk(0, 2, ints(1), floats(1e-6), HELD.source)
    assert rules.judge_append(HELD, 3, chunk, None).changes


def test_a_trajectory_has_a_greatest_length():
    full = HELD._replace(num_tokens=rules.MAX_TOKENS - 2)
    assert rules.judge_append(full, 3, CHUNK, None).changes
    full = HELD._replace(num_tokens=rules.MAX_TOKENS - 1)
    assert "at most" in rules.judge_append(full, 3, CHUNK, None).reason


def test_finish_must_agree_on_the_tokens_and_repeats_only_itself():
    assert rules.judge_finish(HELD, 3, "stop", 2).changes
    assert rules.judge_finish(HELD, 3, "stop", 3).answer == "refused"
    done = HELD._replace(status="generated", finish_reason="stop")
    assert rules.judge_finish(done, 3, "stop", 2) == ("ok", "", False)
    assert rules.judge_finish(done, 3, "length", 2).answer == "refused"
    assert rules.judge_finish(done, 3, "stop", 1).answer == "refused"
    assert rules.judge_finish(HELD._replace(end="dropped"), 3, "stop", 2).answer == "refused"


def test_the_first_reward_stays():
    done = HELD._replace(status="generated")
    assert rules.judge_reward(done, 3, 0.1, "ok", "") == ("ok", "", True)
    rewarded = done._replace(
        status="rewarded", reward_bits=struct.pack("<d", 0.1), reward_reason="", reward_detail=""
    )
    assert rules.judge_reward(rewarded, 3, 0.1, "", "") == ("ok", "", False)
    for other in [(math.nextafter(0.1, 1), "", ""), (None, "", ""), (0.1, "x", ""), (0.1, "", "x")]:
        assert rules.judge_reward(rewarded, 3, *other) == ("already", "", False)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_reward_is_a_finite_number(score):
    verdict = rules.judge_reward(HELD._replace(status="generated"), 3, score, "", "")
    assert verdict.answer == "refused"


@pytest.mark.parametrize("changes", [{}, {"status": "generated", "end": "dropped"}])
def test_no_reward_before_the_response_or_after_the_end(changes):
    assert rules.judge_reward(HELD._replace(**changes), 3, 1.0, "", "").answer == "refused"


def _ending(end: str, placement: int = 3, step: int = 2, reason: str = "r", **changes) -> Row:
    asked = ASKED._replace(end=end, end_reason=reason, end_step=step, placement=placement)
    return asked._replace(attempt=0, **changes)


def test_an_end_fences_and_is_final():
    assert rules.judge_end(HELD, _ending("dropped", placement=2)).answer == "fenced"
    assert rules.judge_end(HELD, _ending("dropped", placement=8)).changes
    ended = rules.apply_end(HELD, _ending("dropped", placement=8))
    assert ended == HELD._replace(placement=8, end="dropped", end_reason="r", end_step=2)
    for placement in (2, 8, 9):
        repeat = rules.judge_end(ended, _ending("dropped", placement=placement))
        assert repeat == ("ok", "", False)
    for other in (_ending("dropped", step=3), _ending("dropped", reason="x"), _ending("trained")):
        assert rules.judge_end(ended, other).answer == "refused"


def test_only_what_is_rewarded_is_trained_and_only_for_its_purpose():
    rewarded = HELD._replace(status="rewarded")
    assert rules.judge_end(rewarded, _ending("trained")).changes
    assert rules.judge_end(rewarded, _ending("evaluated")).answer == "refused"
    assert rules.judge_end(HELD, _ending("trained")).answer == "refused"
    held_out = rewarded._replace(purpose="eval")
    assert rules.judge_end(held_out, _ending("evaluated", purpose="eval")).changes
    assert rules.judge_end(held_out, _ending("trained", purpose="eval")).answer == "refused"
    assert rules.judge_end(rewarded, _ending("trained", row_index=8)).answer == "refused"


def test_what_was_never_opened_can_only_be_dropped():
    assert rules.judge_end(None, _ending("dropped")).changes
    assert rules.apply_end(None, _ending("dropped")) == _ending("dropped")
    assert rules.judge_end(None, _ending("trained")).answer == "refused"


def test_the_digest_does_not_depend_on_the_cut_and_covers_every_byte():
    tokens, logprobs = ints(1, 2, 3), floats(-1, -2, -3)
    digest = rules.digest_payload(tokens, logprobs)
    assert len(digest) == 32
    assert rules.digest_payload(ints(1, 2, 4), logprobs) != digest
    assert rules.digest_payload(tokens, floats(-1, -2, -4)) != digest


def test_spans_join_what_one_source_sampled_in_a_row():
    """A source that comes back has a separate span."""
    parts = [(2, HELD.source), (1, HELD.source), (3, OTHER), (1, OTHER), (1, HELD.source)]
    chunks = [Chunk(0, 0, ints(*range(n)), b"", source) for n, source in parts]
    found = rules.compute_spans(chunks)
    assert found == ((*HELD.source, 3), (*OTHER, 4), (*HELD.source, 1))
    assert rules.compute_spans([]) == ()
