"""Evaluation score by prompt length; a mean over easy and hard prompts hides both.

Reads   RUN/store.sqlite (evaluation prompts and samples), which samples were correct
Gives   by_prompt_length: for the first and the last evaluation, the correct samples of each length

Prompts of equal length stay together, and each range has about a quarter of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from laminar.config import ConfigError
from laminar.core.state.evaluation_scores import EvaluationResult
from laminar.names.ids import Purpose
from laminar.run.directory import STORE_FILE
from laminar.storage import books
from laminar.storage.rows import PromptKey
from laminar.storage.rules import TOKEN_BYTES
from laminar.storage.tables import Tables, TrajectoryFilter

RANGES = 4

Item = TypeVar("Item")


class EvaluationResponse(msgspec.Struct, frozen=True):
    """Evaluation sample."""

    evaluation: int  #: index of the evaluation
    prompt_tokens: int
    correct: bool


def by_prompt_length(
    run_dir: Path, evaluations: Sequence[EvaluationResult], correct: Mapping[str, bool | None]
) -> list[dict[str, int]]:
    """Return the counts by prompt length, shortest first.

    Empty if all prompts have the same length or nothing was evaluated.
    """
    if not evaluations or not (run_dir / STORE_FILE).is_file():
        return []
    answers = _read_responses(run_dir, correct)
    parts = split_by_length(answers, lambda a: a.prompt_tokens, RANGES)
    found = []
    for part in parts if len(parts) > 1 else []:
        first = [a.correct for a in part if a.evaluation == evaluations[0].index]
        last = [a.correct for a in part if a.evaluation == evaluations[-1].index]
        counts = {"first_correct": sum(first), "first_total": len(first)}
        counts |= {"last_correct": sum(last), "last_total": len(last)}
        low, high = part[0].prompt_tokens, part[-1].prompt_tokens
        found.append({"prompt_tokens_min": low, "prompt_tokens_max": high, **counts})
    return found


def split_by_length(
    items: Sequence[Item], get_length: Callable[[Item], int], count: int
) -> list[list[Item]]:
    """Split items, shortest first, into up to `count` parts of about equal size.

    Items of equal length stay together.
    """
    if not items:
        return []
    ordered = sorted(items, key=get_length)
    lengths = np.array([get_length(item) for item in ordered], dtype=np.int64)
    tops = np.quantile(lengths, [i / count for i in range(1, count)], method="lower")
    ends = np.unique([*np.searchsorted(lengths, tops, side="right"), len(ordered)]).tolist()
    return [ordered[begin:end] for begin, end in pairwise([0, *ends])]


def _read_responses(run_dir: Path, correct: Mapping[str, bool | None]) -> list[EvaluationResponse]:
    found = []
    with books.open_tables(run_dir / STORE_FILE) as tables:
        tokens: dict[int, int] = {}
        for _, row in tables.find_newest(TrajectoryFilter.finished_for(Purpose.EVAL)):
            if row.row_index not in tokens:
                tokens[row.row_index] = _prompt_tokens(tables, row.row_index)
            right = correct.get(row.id)
            if row.end == "evaluated" and right is not None:
                index = int(row.group_id.partition(".")[0].removeprefix("e"))
                found.append(EvaluationResponse(index, tokens[row.row_index], right))
    return found


def _prompt_tokens(tables: Tables, row_index: int) -> int:
    key = PromptKey(Purpose.EVAL, row_index)
    prompt = tables.get_prompt(key)
    if prompt is None:
        raise ConfigError(f"evaluation prompt {row_index} is not in the store")
    return len(tables.get_prompt_ids(key, prompt)) // TOKEN_BYTES
