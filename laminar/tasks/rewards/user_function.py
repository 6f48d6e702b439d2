"""The user's reward function: found in its file and called in the style it is written in.

Reads   the user's Python file, a RewardCall per score
Gives   the function's FunctionSpec and scorer; ConfigError at start if it cannot work

Users bring functions written for verl (`solution_str`), TRL (lists, one call for all siblings) or a
Rubric of verifiers in its old style (`completion`). The names of the parameters determine the
style, so such files run unchanged. A function may also be an object with `__call__` or a
functools.partial.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from laminar.config import ConfigError
from laminar.run.user_code import import_file
from laminar.run.user_file import describe_error
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.rewards.results import (
    Awaiter,
    Extras,
    FunctionSpec,
    RewardCall,
    RewardResult,
    Scorer,
    call_guarded,
    format_names,
    parse_result,
    select_accepted,
    select_extras,
)

Function = Callable[..., Any]

IMPORT_TIMEOUT_S = 120.0  #: time limit of the import of a user's file

ENVIRONMENTS = "environments"
"""TRL's parameter for the environment objects of the completions."""

#: Style by parameter name; the first of these names that a function has decides.
MARKERS = {
    "solution_str": "verl",
    "completions": "group",
    ENVIRONMENTS: "group",
    "completion": "single",
    "states": "group",
    "state": "single",
    "completion_ids": "group",
    "prompts": "group",
}


# --- at start -----------------------------------------------------------------------------------


def custom_spec(path: str, name: str) -> FunctionSpec:
    """Build the spec of the function `name`, or of the file's only one; raise ConfigError."""
    name, function = load_quietly(path, name)
    style = _detect_style(function, f"{name} of {path}")
    return FunctionSpec(
        kind="custom",
        style=style,
        path=str(Path(path).resolve()),
        name=name,
        takes_environments=ENVIRONMENTS in inspect.signature(function).parameters,
    )


def load_quietly(path: str, name: str) -> tuple[str, Function]:
    """Load a function outside a worker, without the file's output, which the worker logs."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return load_function(path, name)


def load_function(path: str, name: str) -> tuple[str, Function]:
    """Import a Python file and return its function with the name; raise ConfigError."""
    module = import_file(Path(path))
    public = _find_public(module)
    if not name:
        name = _choose_function(path, public)
    function = getattr(module, name, None)
    if inspect.isclass(function):
        raise ConfigError(
            f"{name} in {path} is a class; name a function, or an instance of it in the file"
        )
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}; it has {format_names(public)}")
    return name, function


def _choose_function(path: str, public: dict[str, Function]) -> str:
    """Return the name of the default function of a file."""
    if "compute_score" in public:
        return "compute_score"
    if len(public) == 1:
        return next(iter(public))
    if not public:
        raise ConfigError(
            f"{path} has no public function; write one, such as "
            "compute_score(data_source, solution_str, ground_truth, extra_info)"
        )
    raise ConfigError(
        f"{path} has the public functions {format_names(public)}; name one of them in "
        "reward.custom_reward_function.name, or in its entry of reward.functions"
    )


def _detect_style(function: Function, where: str) -> str:
    names = inspect.signature(function).parameters
    for marker, style in MARKERS.items():
        if marker in names:
            return style
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
    if takes_all and "trace" not in names:
        return "group"  # as TRL calls each function
    trace = "; the trace of a verifiers Task is not supported" if "trace" in names else ""
    raise ConfigError(
        f"the parameters of {where} are {format_names(names)}; it needs solution_str (verl), "
        "completions (TRL, all siblings in one call) or completion (a Rubric of verifiers, its old "
        f"style){trace}"
    )


def _find_public(module: ModuleType) -> dict[str, Function]:
    """Return the public functions that the file defines, or else its callable objects."""
    found = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not inspect.isclass(value) and not name.startswith("_")
    }
    own = {
        name: value
        for name, value in found.items()
        if isinstance(value, partial) or getattr(value, "__module__", "") == module.__name__
    }
    return {name: value for name, value in own.items() if inspect.isfunction(value)} or own


def check_arguments(spec: FunctionSpec, function: Function, row: PromptRow) -> None:
    """Raise ConfigError if the function cannot be called with the values of a row."""
    call = RewardCall(row, [("", [])])
    offered = (
        _group_values(call, _MetricLog(1))
        if spec.style == "group"
        else _make_values(spec.style, call)
    )
    offered |= {ENVIRONMENTS: [None]} if spec.takes_environments else {}
    try:
        inspect.signature(function).bind(**select_accepted(function, offered))
    except TypeError as error:
        raise ConfigError(
            f"{spec.name} of {spec.path} cannot be called for row {row.index} of "
            f"{row.data_source}: {error}; available arguments: {format_names(offered)}"
        ) from None


# --- in the worker ------------------------------------------------------------------------------


def open_function(spec: FunctionSpec, environments: list[Any]) -> Scorer:
    """Return the scorer of a user's function; raise ConfigError.

    `environments`: in a session, its environment once it was reset.
    """
    _, function = load_function(spec.path, spec.name)
    score = _score_group if spec.style == "group" else _score_one
    settle = Awaiter()
    bound = partial(function, **{ENVIRONMENTS: environments}) if spec.takes_environments else None
    return lambda call: score(spec, bound or function, settle, call)


def _score_one(
    spec: FunctionSpec, function: Function, settle: Awaiter, call: RewardCall
) -> list[RewardResult]:
    def score(completion: tuple[str, list[int]]) -> Any:
        alone = RewardCall(call.row, [completion], call.step)
        return settle(function(**select_accepted(function, _make_values(spec.style, alone))))

    return [call_guarded(partial(score, one), spec.path) for one in call.completions]


def _score_group(
    spec: FunctionSpec, function: Function, settle: Awaiter, call: RewardCall
) -> list[RewardResult]:
    count, log = len(call.completions), _MetricLog(len(call.completions))
    offered = select_accepted(function, _group_values(call, log))
    try:
        scores = _unpack_scores(settle(function(**offered)))
    except BaseException as error:  # SystemExit too is the function's own failure
        return [RewardResult(None, "error", describe_error(error, spec.path))] * count
    if not isinstance(scores, list | tuple) or len(scores) != count:
        detail = (
            f"returned {_describe_shape(scores)} for {count} completions, "
            f"not a list of {count} scores"
        )
        return [RewardResult(None, "wrong-length", detail)] * count
    results = [call_guarded(partial(parse_result, score), spec.path) for score in scores]
    return [
        RewardResult(r.reward, r.reason, r.detail, select_extras({**r.extras, **extras}))
        for r, extras in zip(results, log.extras, strict=True)
    ]


def _unpack_scores(scores: Any) -> Any:
    """Convert an array or tensor of scores, a row or a column, to a list."""
    shape = tuple(getattr(scores, "shape", ()))
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        return scores.reshape(-1).tolist()
    return scores


def _describe_shape(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"


class _MetricLog:
    """TRL's log_metric(name, value) and log_extra(column, values) of a call."""

    def __init__(self, count: int) -> None:
        self.extras: list[Extras] = [{} for _ in range(count)]

    def log_metric(self, name: str, value: float) -> None:
        for extras in self.extras:
            extras.update(select_extras({name: value}))

    def log_extra(self, column: str, values: list[Any]) -> None:
        for extras, value in zip(self.extras, values, strict=True):
            extras.update(select_extras({column: value}))


def _make_values(style: str, call: RewardCall) -> dict[str, Any]:
    """Return the values that a function for one response can take, by name."""
    row, (text, ids) = call.row, call.completions[0]
    if style == "verl":
        return {
            "data_source": row.data_source,
            "solution_str": text,
            "ground_truth": row.ground_truth,
            "extra_info": row.columns.get("extra_info", row.columns),
        }
    common = {**_row_values(row), "prompt": row.prompt, "completion": _make_message(row, text)}
    names = ("prompt", "completion", "answer", "info", "task")
    return {**common, "completion_ids": ids, "state": {name: common[name] for name in names}}


def _group_values(call: RewardCall, log: _MetricLog) -> dict[str, Any]:
    """Return the values that a function for all siblings can take: lists with an entry each."""
    row, count = call.row, len(call.completions)
    alone = [RewardCall(row, [completion], call.step) for completion in call.completions]
    states = [_make_values("single", one)["state"] for one in alone]
    return {
        "states": states,
        **{f"{name}s": [state[name] for state in states] for name in ("answer", "info", "task")},
        **{name: [value] * count for name, value in _row_values(row).items()},
        "prompts": [row.prompt] * count,
        "completions": [_make_message(row, text) for text, _ in call.completions],
        "completion_ids": [ids for _, ids in call.completions],
        "trainer_state": SimpleNamespace(global_step=call.step),
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }


def _row_values(row: PromptRow) -> dict[str, Any]:
    """Return the columns, with the standard names added that no column has."""
    return {
        "answer": row.ground_truth,
        "ground_truth": row.ground_truth,
        "data_source": row.data_source,
        "task": row.data_source,
        "info": row.columns,
        **row.columns,
    }


def _make_message(row: PromptRow, text: str) -> str | list[dict[str, str]]:
    """Return a completion in the form of its prompt: messages for messages, text for text."""
    return text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
