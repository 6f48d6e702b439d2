"""Resolution of a config's reward functions, and their opening in a worker.

Reads   Config at start (`reward_spec`)
Gives   RewardSpec, JSON-able, from which a worker opens its scorer

Settings that cannot work are errors at start. A failure on a response is a result with a reason,
never a score; only the code that has `reward.error_score` turns it into a score.
`reward.functions` lists several functions with their weights; without it, the other keys name a
single function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from laminar.config import Config, ConfigError, WeightedFunctionConfig
from laminar.run.user_code import SUFFIX
from laminar.tasks.data.prompts import ANSWER_KEYS, PromptRow, columns_of, from_plain
from laminar.tasks.rewards import results
from laminar.tasks.rewards.builtin_scorers import dataset_scorer, exact_scorer, math_scorer
from laminar.tasks.rewards.user_function import (
    check_arguments,
    custom_spec,
    load_quietly,
    open_function,
)

BUILT_IN = {"dataset": dataset_scorer, "math": math_scorer, "exact": exact_scorer}


def reward_spec(config: Config) -> results.RewardSpec:
    """Resolve the reward section and import the user's files; raise ConfigError."""
    listed = config.reward.functions or [_the_only(config)]
    functions = _label_functions([_resolve_function(config, entry) for entry in listed])
    # Siblings end their turns one by one.
    one_by_one = config.has_sessions and config.reward.scope == "auto"
    scope = "trajectory" if one_by_one else _choose_scope(config.reward.scope, functions)
    spec = results.RewardSpec(scope=scope, functions=functions)
    if spec.takes_environments and not config.env.path:
        raise ConfigError(
            f"{', '.join(map(describe_function, functions))} takes environments, but env.path is "
            "empty: name the file of the environment's class"
        )
    return spec


def _the_only(config: Config) -> WeightedFunctionConfig:
    """Return the function that reward.kind and reward.custom_reward_function name."""
    kind, custom = config.reward.kind, config.reward.custom_reward_function
    if kind == "auto":
        kind = "custom" if custom.path else "dataset" if config.data.dataset else "math"
    if kind == "custom":
        return WeightedFunctionConfig(path=custom.path, name=custom.name)
    if custom.path:
        raise ConfigError(
            f"reward.kind = {kind!r} leaves reward.custom_reward_function.path = "
            f"{custom.path!r} unused; remove one of them"
        )
    return WeightedFunctionConfig(name=kind)


def _resolve_function(config: Config, entry: WeightedFunctionConfig) -> results.FunctionSpec:
    """Resolve a function; without a path it names a built-in scorer."""
    if entry.path:
        return msgspec.structs.replace(custom_spec(entry.path, entry.name), weight=entry.weight)
    if entry.name not in BUILT_IN:
        raise ConfigError(
            f"reward.functions has an entry with the name {entry.name!r} and no path; give the "
            f"path of a Python file, or one of the names {', '.join(BUILT_IN)}"
        )
    if entry.name != "dataset":
        return results.FunctionSpec(kind=entry.name, name=entry.name, weight=entry.weight)
    if not config.data.dataset:
        raise ConfigError("reward.kind = 'dataset' needs data.dataset; set it, or kind = 'math'")
    return results.FunctionSpec(
        kind=entry.name,
        name=entry.name,
        dataset=config.data.dataset,
        dataset_config=config.data.dataset_config,
        weight=entry.weight,
    )


def _label_functions(functions: Sequence[results.FunctionSpec]) -> list[results.FunctionSpec]:
    """Label each function with its name, preceded by its file's if two have the same name."""
    names = Counter(function.name for function in functions)
    found = [
        msgspec.structs.replace(
            f, label=f.name if names[f.name] == 1 else f"{Path(f.path).stem}.{f.name}"
        )
        for f in functions
    ]
    labels = [function.label for function in found]
    if twice := next((label for label in labels if labels.count(label) > 1), ""):
        raise ConfigError(
            f"reward.functions has {twice} twice; list each function once, and give files with "
            "functions of the same name different names"
        )
    return found


def _choose_scope(asked: str, functions: Sequence[results.FunctionSpec]) -> str:
    """Choose the scope of a call: if any function scores whole groups, all get groups."""
    takes_groups = any(function.style == "group" for function in functions)
    if asked == "group" and not takes_groups:
        names = ", ".join(map(describe_function, functions))
        raise ConfigError(
            f"reward.scope = 'group' needs a function that takes completions, but {names} scores "
            "one response at a time; set reward.scope = 'auto'"
        )
    return asked if asked != "auto" else "group" if takes_groups else "trajectory"


def describe_function(function: results.FunctionSpec) -> str:
    """Describe the function for a user."""
    if function.kind == "custom":
        is_stored = function.path.endswith(SUFFIX)
        return function.name if is_stored else f"{function.name} of {function.path}"
    if function.kind == "dataset":
        return f"the scorer of {function.dataset}"
    return f"the {function.kind} scorer"


def check_rows(spec: results.RewardSpec, rows: Iterable[PromptRow]) -> None:
    """Raise ConfigError for a row that one of the functions could never score."""
    loaded = [
        load_quietly(f.path, f.name)[1] if f.kind == "custom" else None for f in spec.functions
    ]
    for row in rows:
        for function, custom in zip(spec.functions, loaded, strict=True):
            if custom is not None:
                check_arguments(function, custom, _restore_row(row))
            else:
                _check_row(function, row)


def _check_row(function: results.FunctionSpec, row: PromptRow) -> None:
    if function.kind == "dataset" and not {"answer", "metadata"} <= row.columns.keys():
        raise ConfigError(
            f"row {row.index} of {row.data_source} is not an item of the dataset "
            f"{function.dataset}, so its scorer cannot score it; set reward.kind"
        )
    if function.kind not in ("math", "exact"):
        return
    if row.ground_truth is None:
        raise ConfigError(
            f"row {row.index} of {row.data_source} has no answer ({columns_of(row)}), and "
            f"{describe_function(function)} compares with one: name its column by "
            f"data.answer_key (default: {', '.join(ANSWER_KEYS)})"
        )
    if not _is_answer(row.ground_truth):
        raise ConfigError(
            f"row {row.index} of {row.data_source} has the answer {row.ground_truth!r}, but "
            f"reward.kind = {function.kind!r} needs text or a number; set data.answer_key"
        )


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def open_scorer(spec: results.RewardSpec, environments: list[Any] | None = None) -> results.Scorer:
    """Import what the functions need and return their scorer; raises ConfigError.

    The scorer runs in the main thread of its process: math-verify ends a long parse by SIGALRM.
    """
    environments = [] if environments is None else environments
    scorers = [_open_single_scorer(function, environments) for function in spec.functions]

    def score(call: results.RewardCall) -> list[results.RewardResult]:
        call = results.RewardCall(_restore_row(call.row), call.completions, call.step)
        return results.combine_results(spec.functions, [scorer(call) for scorer in scorers])

    return score


def _open_single_scorer(function: results.FunctionSpec, environments: list[Any]) -> results.Scorer:
    if function.kind == "custom":
        return open_function(function, environments)
    score_text = BUILT_IN[function.kind](function)
    return lambda call: [
        results.call_guarded(partial(score_text, call.row, text), "")
        for text, _ in call.completions
    ]


def _restore_row(row: PromptRow) -> PromptRow:
    return replace(row, ground_truth=from_plain(row.ground_truth), columns=from_plain(row.columns))
