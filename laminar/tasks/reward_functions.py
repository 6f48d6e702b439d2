"""What scores a response: the built-in scorers and the user's function in the style it is written.

Reads   Config and the user's Python file at start (`reward_spec`), a RewardCall per score
Gives   RewardSpec, JSON-able, from which a worker opens its scorer; RewardResult per response

Users bring reward functions written for verl (`solution_str`), TRL (lists, one call for all
siblings) or verifiers (`completion`). The names of the parameters say which, so such a file runs
unchanged, and what cannot work is an error at start. What goes wrong on a response is a result with
its reason, never a score: only whoever holds `reward.error_score` turns it into one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import math
import numbers
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec

from laminar.config import Config, ConfigError
from laminar.tasks.prompts import PromptRow, make_dataset, restore

Function = Callable[..., Any]
DETAIL_CHARS = 240

#: The style that a parameter name shows; the first of these that a function has decides.
MARKERS = {
    "solution_str": "verl",
    "completions": "group",
    "completion": "single",
    "states": "group",
    "state": "single",
}


class RewardSpec(msgspec.Struct, frozen=True):
    """Which scorer, resolved: all that a worker process needs to open it."""

    kind: str  #: dataset | math | exact | custom
    scope: str  #: trajectory (one call per response) | group (one call for all siblings)
    style: str = ""  #: of a custom function: verl | group | single
    path: str = ""  #: absolute
    name: str = ""
    dataset: str = ""
    dataset_config: dict[str, Any] = {}


class RewardCall(msgspec.Struct, frozen=True):
    """Responses to one prompt that want scores."""

    row: PromptRow
    completions: list[tuple[str, list[int]]]  #: text and token ids of each response
    step: int = 0  #: completed steps, shown to a TRL function as trainer_state.global_step


class RewardResult(msgspec.Struct, frozen=True):
    score: float | None
    reason: str = "ok"  #: ok | error | timeout | unscored (the function returned None)
    detail: str = ""
    extras: dict[str, float] = {}  #: further figures that the function returned or logged


Scorer = Callable[[RewardCall], list[RewardResult]]


# --- at start -----------------------------------------------------------------------------------


def reward_spec(config: Config) -> RewardSpec:
    """Resolve the reward section; imports the user's file; raises ConfigError."""
    reward, path = config.reward, config.reward.custom_reward_function.path
    kind = reward.kind
    if kind == "auto":
        kind = "custom" if path else "dataset" if config.data.dataset else "math"
    if kind == "custom":
        return _custom_spec(path, reward.custom_reward_function.name, reward.scope)
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
        signature = inspect.signature(load_function(spec.path, spec.name)[1])
    for row in rows:
        if signature is not None:
            _check_arguments(spec, signature, row)
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


def load_function(path: str, name: str) -> tuple[str, Function]:
    """Import a Python file and find the function in it (and its name); raises ConfigError."""
    module = _import_file(Path(path))
    public = _public(module)
    if not name and "compute_score" in public:
        name = "compute_score"
    elif not name and len(public) == 1:
        name = next(iter(public))
    elif not name:
        raise ConfigError(
            f"{path} has the public functions {_list(public)}; name one of them in "
            "reward.custom_reward_function.name"
        )
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}; it has {_list(public)}")
    return name, function


def _custom_spec(path: str, name: str, scope: str) -> RewardSpec:
    name, function = load_function(path, name)
    style = _style(function, f"{name} of {path}")
    if scope == "group" and style != "group":
        raise ConfigError(
            f"reward.scope = 'group' needs a function that takes completions, but {name} of "
            f"{path} takes one response at a time; set reward.scope = 'auto'"
        )
    if scope == "auto":
        scope = "group" if style == "group" else "trajectory"
    resolved = str(Path(path).resolve())
    return RewardSpec(kind="custom", scope=scope, style=style, path=resolved, name=name)


def _style(function: Function, where: str) -> str:
    names = inspect.signature(function).parameters
    for marker, style in MARKERS.items():
        if marker in names:
            return style
    raise ConfigError(
        f"the parameters of {where} are {_list(names)}; it needs solution_str (verl), "
        "completions (TRL, all siblings in one call) or completion (verifiers)"
    )


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"reward.custom_reward_function.path = {str(path)!r} is not a file; correct the path"
        )
    name = f"laminar_user_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ConfigError(f"{path} is not a Python file; its name must end in .py")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a helper beside the file shadows no library
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} does not import: {describe(error, str(path))}") from None
    return module


def _public(module: ModuleType) -> dict[str, Function]:
    """The functions that the file itself defines, in its order."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _check_arguments(spec: RewardSpec, signature: inspect.Signature, row: PromptRow) -> None:
    call = RewardCall(_restored(row), [("", [])])
    offered = _group_values(call, _Log(1)) if spec.style == "group" else _values(spec.style, call)
    try:
        signature.bind(**_accepted(signature, offered))
    except TypeError as error:
        raise ConfigError(
            f"{spec.name} of {spec.path} cannot be called for row {row.index} of "
            f"{row.data_source}: {error}; it can have {_list(offered)}"
        ) from None


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


# --- in the worker ------------------------------------------------------------------------------


def open_scorer(spec: RewardSpec) -> Scorer:
    """Import what the kind needs and return its scorer; raises ConfigError.

    The scorer runs in the main thread of its process: math-verify ends a long parse by SIGALRM.
    """
    if spec.kind == "custom":
        _, function = load_function(spec.path, spec.name)
        score = _score_group if spec.style == "group" else _score_one
        settle = _Settle()
        return lambda call: score(spec, function, settle, _restored_call(call))
    built_in = {"dataset": _dataset_scorer, "math": _math_scorer, "exact": _exact_scorer}
    score_text = built_in[spec.kind](spec)

    def score_each(call: RewardCall) -> list[RewardResult]:
        row = _restored(call.row)
        return [_guarded(partial(score_text, row, text), "") for text, _ in call.completions]

    return score_each


def describe(error: BaseException, path: str) -> str:
    """One short line: type, message, and the place in the user's file (else the innermost)."""
    lines = str(error).strip().splitlines()
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if f.filename == path] or frames
    if frames and not isinstance(error, SyntaxError):
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        return text[: DETAIL_CHARS - len(place)] + place
    return text[:DETAIL_CHARS]


def _guarded(score: Callable[[], Any], path: str) -> RewardResult:
    try:
        return _result(score())
    except BaseException as error:  # SystemExit too is the function's own failure
        return RewardResult(None, "error", describe(error, path))


def _result(value: Any) -> RewardResult:
    """A function's return value as a result; an unusable one is an error."""
    extras: dict[str, float] = {}
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            return RewardResult(None, "error", f"returned a dict without score: {_list(value)}")
        extras = _numbers({k: v for k, v in value.items() if k != "score"})
        value = value["score"]
    if value is None:
        return RewardResult(None, "unscored", "", extras)
    if not _is_finite(value):
        shown = repr(value)[:80]
        detail = f"returned {shown} ({type(value).__name__}), which is not a finite number"
        return RewardResult(None, "error", detail, extras)
    return RewardResult(float(value), "ok", "", extras)


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be a metric; text beside a score (verl's `pred`) is not one."""
    return {str(key): float(value) for key, value in values.items() if _is_finite(value)}


def _restored(row: PromptRow) -> PromptRow:
    return replace(row, ground_truth=restore(row.ground_truth), columns=restore(row.columns))


def _restored_call(call: RewardCall) -> RewardCall:
    return RewardCall(_restored(call.row), call.completions, call.step)


# Built-in scorers: (row, response text) -> number or RewardResult.


def _dataset_scorer(spec: RewardSpec) -> Callable[[PromptRow, str], Any]:
    from reasoning_gym.utils import extract_answer

    dataset = make_dataset(spec.dataset, spec.dataset_config, size=1, seed=0)
    return lambda row, text: dataset.score_answer(extract_answer(text), row.columns)


def _exact_scorer(_spec: RewardSpec) -> Callable[[PromptRow, str], Any]:
    def score(row: PromptRow, text: str) -> float:
        tagged = _tagged_answer(text)
        answer = text if tagged is None else tagged
        return float(answer.strip() == str(row.ground_truth).strip())

    return score


def _math_scorer(_spec: RewardSpec) -> Callable[[PromptRow, str], Any]:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify works only in the main thread: its time limit is SIGALRM")

    def equal(gold: Any, found: Any) -> float | RewardResult:
        late = None
        for pair in itertools.product(gold, found):
            try:
                if verify(*pair, raise_on_error=True):
                    return 1.0
            except TimeoutException as error:
                late = RewardResult(None, "timeout", f"math-verify: {error}")
            except Exception:  # SymPy has many ways to say that it cannot compare
                continue
        return late or 0.0

    def score(row: PromptRow, text: str) -> float | RewardResult:
        gold = parse(_math_text(str(row.ground_truth)))
        if not gold:
            raise ValueError(f"the ground truth {row.ground_truth!r} is no mathematical answer")
        tagged = _tagged_answer(text)
        try:
            found = parse(text if tagged is None else _math_text(tagged), raise_on_error=True)
        except TimeoutException:
            return RewardResult(None, "timeout", "math-verify: timeout during parsing")
        except Exception:  # what the parser cannot read is a wrong answer
            return 0.0
        return equal(gold, found)

    return score


def _math_text(answer: str) -> str:
    """A bare answer in a box, so that LaTeX without dollars is read; GSM8K's working is cut off."""
    answer = answer.rpartition("####")[2].strip()
    marked = any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\["))
    return answer if marked else f"\\boxed{{{answer}}}"


def _tagged_answer(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1] if found else None


# The user's function.


class _Settle:
    """Waits for the result of an async function, always on the same event loop.

    One loop for the worker's life, because clients (HTTP sessions) belong to the loop they met.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __call__(self, value: Any) -> Any:
        async def wait(awaitable: Awaitable[Any]) -> Any:
            return await awaitable

        return self._runner.run(wait(value)) if inspect.isawaitable(value) else value


def _score_one(
    spec: RewardSpec, function: Function, settle: _Settle, call: RewardCall
) -> list[RewardResult]:
    signature = inspect.signature(function)

    def score(completion: tuple[str, list[int]]) -> Any:
        alone = RewardCall(call.row, [completion], call.step)
        return settle(function(**_accepted(signature, _values(spec.style, alone))))

    return [_guarded(partial(score, one), spec.path) for one in call.completions]


def _score_group(
    spec: RewardSpec, function: Function, settle: _Settle, call: RewardCall
) -> list[RewardResult]:
    count, log = len(call.completions), _Log(len(call.completions))
    offered = _accepted(inspect.signature(function), _group_values(call, log))
    try:
        scores = settle(function(**offered))
    except BaseException as error:  # SystemExit too is the function's own failure
        return [RewardResult(None, "error", describe(error, spec.path))] * count
    if not isinstance(scores, list | tuple) or len(scores) != count:
        detail = f"returned {_shape(scores)} for {count} completions, not a list of {count} scores"
        return [RewardResult(None, "error", detail)] * count
    results = [_guarded(partial(_result, score), spec.path) for score in scores]
    return [
        RewardResult(r.score, r.reason, r.detail, {**r.extras, **extras})
        for r, extras in zip(results, log.extras, strict=True)
    ]


def _shape(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"


class _Log:
    """TRL's log_metric(name, value) and log_extra(column, values) of one call."""

    def __init__(self, count: int) -> None:
        self.extras: list[dict[str, float]] = [{} for _ in range(count)]

    def metric(self, name: str, value: float) -> None:
        for extras in self.extras:
            extras.update(_numbers({name: value}))

    def extra(self, column: str, values: list[Any]) -> None:
        for extras, value in zip(self.extras, values, strict=True):
            extras.update(_numbers({column: value}))


def _accepted(signature: inspect.Signature, offered: dict[str, Any]) -> dict[str, Any]:
    """What the function declares; everything when it has **kwargs."""
    parameters = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def _values(style: str, call: RewardCall) -> dict[str, Any]:
    """What a function for one response can ask for by name."""
    row, (text, ids) = call.row, call.completions[0]
    if style == "verl":
        return {
            "data_source": row.data_source,
            "solution_str": text,
            "ground_truth": row.ground_truth,
            "extra_info": row.columns.get("extra_info", row.columns),
        }
    common = {**_row_values(row), "prompt": row.prompt, "completion": _message(row, text)}
    names = ("prompt", "completion", "answer", "info", "task")
    return {**common, "completion_ids": ids, "state": {name: common[name] for name in names}}


def _group_values(call: RewardCall, log: _Log) -> dict[str, Any]:
    """What a function for all siblings can ask for: lists with one entry per sibling."""
    row, count = call.row, len(call.completions)
    alone = [RewardCall(row, [completion], call.step) for completion in call.completions]
    states = [_values("single", one)["state"] for one in alone]
    return {
        "states": states,
        **{f"{name}s": [state[name] for state in states] for name in ("answer", "info", "task")},
        **{name: [value] * count for name, value in _row_values(row).items()},
        "prompts": [row.prompt] * count,
        "completions": [_message(row, text) for text, _ in call.completions],
        "completion_ids": [ids for _, ids in call.completions],
        "trainer_state": SimpleNamespace(global_step=call.step),
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def _row_values(row: PromptRow) -> dict[str, Any]:
    """The columns, and the names that every row answers to where no column has them."""
    return {
        "answer": row.ground_truth,
        "ground_truth": row.ground_truth,
        "data_source": row.data_source,
        "task": row.data_source,
        "info": row.columns,
        **row.columns,
    }


def _message(row: PromptRow, text: str) -> str | list[dict[str, str]]:
    """A completion in the form of its prompt: messages for messages, text for text."""
    return text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
