"""What scores a response: which scorer a config means, and how a worker opens it.

Reads   Config at start (`reward_spec`)
Gives   RewardSpec, JSON-able, from which a worker opens its scorer

What cannot work is an error at start. What goes wrong on a response is a result with its reason,
never a score: only whoever holds `reward.error_score` turns it into one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from laminar.config import Config, ConfigError
from laminar.tasks.builtin_scorers import dataset_scorer, exact_scorer, math_scorer
from laminar.tasks.prompts import PromptRow, restore
from laminar.tasks.rewards import RewardCall, RewardResult, RewardSpec, Scorer, guarded
from laminar.tasks.user_function import (
    check_arguments,
    custom_spec,
    load_in_silence,
    open_function,
)


def reward_spec(config: Config) -> RewardSpec:
    """Resolve the reward section; imports the user's file; raises ConfigError."""
    reward, path = config.reward, config.reward.custom_reward_function.path
    kind = reward.kind
    if kind == "auto":
        kind = "custom" if path else "dataset" if config.data.dataset else "math"
    if kind == "custom":
        return custom_spec(path, reward.custom_reward_function.name, reward.scope)
    if path:
        raise ConfigError(
            f"reward.kind = {kind!r} leaves reward.custom_reward_function.path = {path!r} unused; "
            "remove one of them"
        )
    if kind == "dataset" and not config.data.dataset:
        raise ConfigError("reward.kind = 'dataset' needs data.dataset; set it, or kind = 'math'")
    if reward.scope == "group":
        raise ConfigError(
            f"reward.scope = 'group' does not fit the {kind} scorer, which takes one response at "
            "a time; set reward.scope = 'auto'"
        )
    if kind == "dataset":
        return RewardSpec(
            kind=kind,
            scope="trajectory",
            dataset=config.data.dataset,
            dataset_config=config.data.dataset_config,
        )
    return RewardSpec(kind=kind, scope="trajectory")


def check_rows(spec: RewardSpec, rows: Iterable[PromptRow]) -> None:
    """Raise ConfigError for a row that the scorer could never score."""
    signature = None
    if spec.kind == "custom":
        signature = inspect.signature(load_in_silence(spec.path, spec.name)[1])
    for row in rows:
        if signature is not None:
            check_arguments(spec, signature, _restored(row))
        elif spec.kind == "dataset" and not {"answer", "metadata"} <= row.columns.keys():
            raise ConfigError(
                f"row {row.index} of {row.data_source} is no item of the dataset {spec.dataset}, "
                "so its scorer cannot score it; set reward.kind"
            )
        elif spec.kind in ("math", "exact") and not _is_answer(row.ground_truth):
            raise ConfigError(
                f"row {row.index} of {row.data_source} has the answer {row.ground_truth!r}, but "
                f"reward.kind = {spec.kind!r} needs text or a number; set data.answer_key"
            )


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def open_scorer(spec: RewardSpec) -> Scorer:
    """Import what the kind needs and return its scorer; raises ConfigError.

    The scorer runs in the main thread of its process: math-verify ends a long parse by SIGALRM.
    """
    if spec.kind == "custom":
        score_call = open_function(spec)
        return lambda call: score_call(_restored_call(call))
    built_in = {"dataset": dataset_scorer, "math": math_scorer, "exact": exact_scorer}
    score_text = built_in[spec.kind](spec)

    def score_each(call: RewardCall) -> list[RewardResult]:
        row = _restored(call.row)
        return [guarded(partial(score_text, row, text), "") for text, _ in call.completions]

    return score_each


def _restored(row: PromptRow) -> PromptRow:
    return replace(row, ground_truth=restore(row.ground_truth), columns=restore(row.columns))


def _restored_call(call: RewardCall) -> RewardCall:
    return RewardCall(_restored(call.row), call.completions, call.step)
