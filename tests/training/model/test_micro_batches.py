"""Mini- and micro-batches, and the tensors of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.storage.rules import TokenSpan
from laminar.training.model.micro_batches import (
    collate_samples,
    micro_batches,
    mini_batches,
    pad_token_rows,
)
from laminar.training.steps import TrainSample, ids_digest

CPU = torch.device("cpu")
Samples = Callable[..., list[TrainSample]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    found = micro_batches(lengths, budget)
    assert sorted(i for rows in found for i in rows) == list(range(len(lengths)))
    for rows in found:
        widths = [lengths[i] for i in rows]
        assert len(rows) == 1 or len(rows) * max(widths) <= budget
    flat = [lengths[i] for rows in found for i in rows]
    assert flat == sorted(lengths, reverse=True)


def test_mini_batches_are_whole_groups_in_their_order(make_samples: Samples) -> None:
    samples = make_samples(groups=5, siblings=2)
    samples = [samples[i] for i in (4, 5, 0, 8, 1, 9, 2, 3, 6, 7)]  # groups 2, 0, 4, 1, 3
    found = [[s.sample_id for s in mini] for mini in mini_batches(samples, 2)]
    assert found == [
        ["0.2.0", "0.2.1", "0.0.0", "0.0.1"],
        ["0.4.0", "0.4.1", "0.1.0", "0.1.1"],
        ["0.3.0", "0.3.1"],
    ]


def test_rows_point_at_the_logits_before_each_scored_token() -> None:
    sequences = [np.array([7, 8, 9, 10], np.int32), np.array([1, 2, 3, 4, 5, 6], np.int32)]
    rows = pad_token_rows(sequences, [2, 3], CPU)
    assert rows.input_ids.tolist() == [[7, 8, 9, 10, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert rows.targets.tolist() == [9, 10, 4, 5, 6]
    width = rows.input_ids.shape[1]
    row, column = rows.index // width, rows.index % width
    assert row.tolist() == [0, 0, 1, 1, 1]
    assert column.tolist() == [1, 2, 2, 3, 4]
    assert rows.counts.tolist() == [2, 3]


def test_collate_repeats_what_belongs_to_a_sample(make_samples: Samples) -> None:
    samples = [replace(s, advantage=float(i)) for i, s in enumerate(make_samples(1, 3))]
    micro = collate_samples(samples, CPU)
    lengths = [len(s.response_ids) for s in samples]
    assert micro.sample_ids == ("0.0.0", "0.0.1", "0.0.2")
    assert micro.advantages.tolist() == np.repeat([0.0, 1.0, 2.0], lengths).tolist()
    assert micro.lengths.tolist() == np.repeat(lengths, lengths).tolist()
    assert micro.temperature.numpy() == pytest.approx(np.repeat([0.7, 1.0, 1.3], lengths))
    assert micro.behaviour.tolist() == np.concatenate([s.logprobs for s in samples]).tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "empty prompt"),
        ({"response_ids": np.zeros(0, np.int32)}, "empty prompt or response"),
        ({"logprobs": np.zeros(99, np.float32)}, "99 log-probs"),
        ({"temperature": 0.0}, "greedy"),
        ({"spans": ()}, r"spans of \[\] tokens"),
        ({"spans": (TokenSpan("a", 1, 1, 99),)}, r"spans of \[99\] tokens"),
        (
            {"spans": (TokenSpan("a", 1, 1, 0), TokenSpan("b", 1, 1, 12))},
            r"spans of \[0, 12\] tokens",
        ),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused(
    make_samples: Samples, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_samples(1, 1)[0], **fields)


def test_the_digest_depends_on_ids_and_order(make_samples: Samples) -> None:
    samples = make_samples(2, 2)
    assert ids_digest(samples) == ids_digest([replace(s, reward=9.0) for s in samples])
    assert ids_digest(samples) != ids_digest(samples[::-1])
    assert len(ids_digest(samples)) == 32
