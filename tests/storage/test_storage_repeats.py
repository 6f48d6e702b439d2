"""Delivery is at least once: whatever is sent again, and however it is batched, changes nothing."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.storage import books
from tools.kit.store_samples import (
    CALL,
    DONE,
    MEMORY,
    append,
    contents,
    end,
    filled,
    finish,
    go_on,
    intend,
    open_,
    reward,
)

NAMES = st.sampled_from(["0.0.0", "e0.1.0"])
PLACEMENTS = st.integers(1, 3)
CHUNKS = st.sampled_from(
    [
        {"tokens": (1, 2)},
        {"tokens": (1, 3)},
        {"tokens": (3,), "offset": 2},
        {"tokens": (4,), "segment": 1},
    ]
)
REQUESTS = st.one_of(
    st.builds(
        lambda name, at, attempt, version: open_(
            name, at, attempt, weight_version=version, replica=f"rollout-{at - 1}"
        ),
        NAMES,
        PLACEMENTS,
        st.integers(1, 2),
        st.integers(5, 6),
    ),
    st.builds(
        lambda name, chunk, at: append(name, placement=at, **chunk), NAMES, CHUNKS, PLACEMENTS
    ),
    st.builds(finish, NAMES, st.sampled_from([0, 2, 3, 4]), PLACEMENTS),
    st.builds(go_on, NAMES, st.sampled_from([(20,), (20, 21)]), st.integers(0, 2), PLACEMENTS),
    st.builds(reward, NAMES, st.sampled_from([0.0, 0.1, None]), PLACEMENTS),
    st.builds(end, NAMES, st.sampled_from(["trained", "evaluated", "dropped"]), PLACEMENTS),
)
ONE_TURN = [
    open_("0.0.0"),
    append("0.0.0", (1, 2)),
    append("0.0.0", (3,), offset=2),
    append("0.0.0", (4,), offset=3),
    append("0.0.0", (5, 6, 7), offset=4),
    finish("0.0.0", 7),
    reward("0.0.0", 0.1),
    end("0.0.0", "trained", step=3),
]
LIFE = [
    *ONE_TURN[:-2],
    intend("0.0.0", (CALL,)),
    go_on("0.0.0", (20, 21), effects=(DONE,)),
    append("0.0.0", (8,), segment=1),
    finish("0.0.0", 8),
    *ONE_TURN[-2:],
]


@st.composite
def histories(draw) -> list:
    """A whole life of one trajectory, in order, with anything else thrown in between."""
    history = list(LIFE)
    for request in draw(st.lists(REQUESTS, max_size=20)):
        history.insert(draw(st.integers(0, len(history))), request)
    return history


FEW = settings(max_examples=50, deadline=None)


def _run(batches) -> tuple[list, dict]:
    """The replies, and what is then stored; a clean book is part of every run."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "store.sqlite"
        database = filled(path)
        replies = [reply for batch in batches for reply in database.handle_batch(batch)]
        database.close()
        assert books.check_integrity(path) == []
        return replies, contents(path)


def _settled(reply) -> bool:
    return all(result.answer != "refused" for result in reply.results)


@FEW
@given(histories(), st.randoms(use_true_random=False))
def test_every_settled_request_may_come_again_at_any_later_time(history, chance: random.Random):
    replies, stored = _run([[request] for request in history])
    delivered, again = [], []
    for request, reply in zip(history, replies, strict=True):
        delivered.append(request)
        if _settled(reply):
            delivered.append(request)
            again.append(request)
        delivered += chance.choices(again, k=2) if again else []
    chance.shuffle(again)
    _, stored_again = _run([delivered + again])
    assert stored_again == stored


@FEW
@given(histories(), st.data())
def test_how_requests_are_batched_changes_nothing(history, data):
    cut = data.draw(st.integers(0, len(history)))
    alone = _run([[request] for request in history])
    assert _run([history[:cut], history[cut:]]) == alone


@FEW
@given(st.randoms(use_true_random=False))
def test_any_order_with_resends_ends_like_the_right_order(chance: random.Random):
    """Each round delivers every request twice in another order, until all were accepted.

    Of a life of one turn: what scores a turn answers it or rewards it, and never asks for both.
    """
    rounds = []
    for _ in ONE_TURN:
        deliveries = ONE_TURN * 2
        chance.shuffle(deliveries)
        rounds.append(deliveries)
    replies, stored = _run(rounds)
    assert all(_settled(reply) for reply in replies[-2 * len(ONE_TURN) :])
    assert stored == _run([ONE_TURN])[1]
