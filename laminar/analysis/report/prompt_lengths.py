"""Evaluation score by prompt length; a mean over easy and hard prompts hides both.

Reads   RUN/store.sqlite (evaluation prompts and samples), the rewards of the log
Gives   by_prompt_length: for the first and the last evaluation, the correct samples of each length

Prompts of equal length stay together, and each range has about a quarter of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from laminar.config import ConfigError
from laminar.core.state.evaluation_scores import EvaluationResult
from laminar.events.events import TrajectoryRewarded
from laminar.names.ids import Purpose, TrajectoryId
from laminar.run.directory import STORE_FILE
from laminar.storage import books
from laminar.storage.rows import PromptKey
from laminar.storage.rules import TOKEN_BYTES
from laminar.storage.tables import Tables, TrajectoryFilter

RANGES = 4


class EvaluationResponse(msgspec.Struct, frozen=True):
    """Evaluation sample."""

    evaluation: int  #: index of the evaluation
    prompt_tokens: int
    correct: bool


def by_prompt_length(
    run_dir: Path,
    evaluations: Sequence[EvaluationResult],
    rewarded: Mapping[TrajectoryId, TrajectoryRewarded],
) -> list[dict[str, int]]:
    """Return the counts by prompt length, shortest first.

    Empty if all prompts have the same length or nothing was evaluated.
    """
    if not evaluations or not (run_dir / STORE_FILE).is_file():
        return []
    answers = _read_responses(run_dir, rewarded)
    lengths = np.array(sorted(a.prompt_tokens for a in answers), dtype=np.int64)
    found = []
    parts = split_ranges(lengths, RANGES)
    for low, high in parts if len(parts) > 1 else []:
        inside = [a for a in answers if low <= a.prompt_tokens <= high]
        first = [a.correct for a in inside if a.evaluation == evaluations[0].index]
        last = [a.correct for a in inside if a.evaluation == evaluations[-1].index]
        counts = {"first_correct": sum(first), "first_total": len(first)}
        counts |= {"last_correct": sum(last), "last_total": len(last)}
        found.append({"prompt_tokens_min": low, "prompt_tokens_max": high, **counts})
    return found


def split_ranges(lengths: NDArray[np.int64], count: int) -> list[tuple[int, int]]:
    """Split sorted lengths into up to `count` (shortest, longest) ranges of about equal size.

    Equal lengths stay together.
    """
    if not len(lengths):
        return []
    quantiles = [i / count for i in range(1, count)]
    tops = sorted({*np.quantile(lengths, quantiles, method="lower").tolist(), int(lengths[-1])})
    parts = np.split(lengths, np.searchsorted(lengths, tops[:-1], side="right"))
    return [(int(part[0]), int(part[-1])) for part in parts]


def _read_responses(
    run_dir: Path, rewarded: Mapping[TrajectoryId, TrajectoryRewarded]
) -> list[EvaluationResponse]:
    found = []
    with books.open_tables(run_dir / STORE_FILE) as tables:
        tokens: dict[int, int] = {}
        for _, row in tables.find_newest(TrajectoryFilter.finished_for(Purpose.EVAL)):
            if row.row_index not in tokens:
                tokens[row.row_index] = _prompt_tokens(tables, row.row_index)
            reward = rewarded.get(TrajectoryId(row.id))
            if row.end == "evaluated" and reward is not None:
                index = int(row.group_id.partition(".")[0].removeprefix("e"))
                found.append(EvaluationResponse(index, tokens[row.row_index], reward.correct))
    return found


def _prompt_tokens(tables: Tables, row_index: int) -> int:
    key = PromptKey(Purpose.EVAL, row_index)
    prompt = tables.get_prompt(key)
    if prompt is None:
        raise ConfigError(f"evaluation prompt {row_index} is not in the store")
    return len(tables.get_prompt_ids(key, prompt)) // TOKEN_BYTES
