"""Requests and results of scoring, shared by the callers and the workers.

Gives   RewardSpec, RewardCall, RewardResult, RewardWorkerLost; select_accepted and Awaiter, for
        the call of a user's function; conversion of its return value or exception to a
        RewardResult; combination of several functions' results

Small extras that a function returns are kept with its score: numbers become metrics, text is shown
to people who look at a sample.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from laminar.run.user_file import DETAIL_CHARS, describe_error, replace_surrogates
from laminar.tasks.data.prompts import PromptRow

FAILURES = ("error", "timeout", "not-a-number", "wrong-length")
"""Failures of a function: it raised, ran too long, did not return a finite number or, as a group
function, a list with an entry per response. The response gets `reward.error_score`."""
FULL_SCORE = 1.0  #: score of a correct response; several datasets give partial credit to wrong ones
EXTRAS_MAX = 32  #: maximum extras kept with a score; each can be a metric
NAME_CHARS, TEXT_CHARS = 64, 256

Extras = dict[str, float | str]


class RewardWorkerLost(RuntimeError):
    """A repeated failure of the infrastructure: there is no score, not even a bad one."""


class FunctionSpec(msgspec.Struct, frozen=True):
    """A resolved reward function: all that a worker process needs to open it."""

    kind: str  #: dataset | math | exact | custom
    style: str = ""  #: style of a custom function: verl | group | single
    path: str = ""  #: absolute
    name: str = ""
    dataset: str = ""
    dataset_config: dict[str, Any] = {}
    weight: float = 1.0  #: weight of the score in the sum
    label: str = ""  #: unique name among several functions
    takes_environments: bool = False  #: a custom function has TRL's parameter `environments`


class RewardSpec(msgspec.Struct, frozen=True):
    """The scoring of a response: the weighted sum of one or more functions."""

    scope: str  #: trajectory (one call per response) | group (one call for all siblings)
    functions: list[FunctionSpec]

    @property
    def custom(self) -> bool:
        """Whether any of the functions is user code."""
        return any(function.kind == "custom" for function in self.functions)

    @property
    def takes_environments(self) -> bool:
        """Whether a function reads the environment, so that sessions call all of them."""
        return any(function.takes_environments for function in self.functions)


class RewardCall(msgspec.Struct, frozen=True):
    """A request to score responses to a prompt."""

    row: PromptRow
    completions: list[tuple[str, list[int]]]  #: text and token ids of each response
    step: int = 0  #: completed steps, which TRL functions see as trainer_state.global_step


class RewardResult(msgspec.Struct, frozen=True):
    reward: float | None
    reason: str = "ok"  #: ok | unscored (the function returned None) | one of FAILURES
    detail: str = ""
    extras: Extras = {}  #: other values that the function returned or logged, up to EXTRAS_MAX


Scorer = Callable[[RewardCall], list[RewardResult]]


def is_correct(score: float, *, truncated: bool) -> bool:
    """Return whether a response has the full score and was not cut off."""
    return score >= FULL_SCORE and not truncated


def call_guarded(score: Callable[[], Any], path: str) -> RewardResult:
    """Call a function of the file `path`; any exception becomes an error of this response."""
    try:
        return parse_result(score())
    except BaseException as error:  # SystemExit too is the function's own failure
        return RewardResult(None, "error", describe_error(error, path))


class Awaiter:
    """Runner of async functions, always on the same event loop.

    The loop lives as long as the process, because clients (HTTP sessions) are bound to their loop.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()  # makes the loop when it first runs something

    def __call__(self, value: Any) -> Any:
        """Return the value, or what it gives once it is awaited."""
        return self._runner.run(to_coroutine(value)) if inspect.isawaitable(value) else value


async def to_coroutine(value: Any) -> Any:
    """Await a value that user code returned: runners take only coroutines."""
    return await value


def select_accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Select the values that the function declares, or all for **kwargs, except a partial's."""
    if isinstance(function, partial):
        offered = {n: value for n, value in offered.items() if n not in function.keywords}
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def apply_error_score(result: RewardResult, error_score: float) -> RewardResult:
    """Give a failed result the score `error_score`; return other results unchanged."""
    if result.reason in FAILURES:
        return msgspec.structs.replace(result, reward=error_score)
    return result


def parse_result(value: Any) -> RewardResult:
    """Convert a function's return value to a result; only finite numbers become scores."""
    extras: Extras = {}
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = {**value[1], "score": value[0]}
    if isinstance(value, Mapping):
        if "score" not in value:
            detail = f"returned a dict without score: {format_names(value)}"
            return RewardResult(None, "not-a-number", replace_surrogates(detail)[:DETAIL_CHARS])
        extras = select_extras({k: v for k, v in value.items() if k != "score"})
        value = value["score"]
    if value is None:
        return RewardResult(None, "unscored", "", extras)
    score = _to_number(value)
    if score is None:
        shown = reprlib.repr(value)
        detail = f"returned {shown} ({type(value).__name__}), which is not a finite number"
        return RewardResult(None, "not-a-number", " ".join(detail.split())[:DETAIL_CHARS], extras)
    return RewardResult(score, "ok", "", extras)


def combine_results(
    functions: Sequence[FunctionSpec], found: Sequence[Sequence[RewardResult]]
) -> list[RewardResult]:
    """Combine the functions' results into a weighted sum for each response.

    A function that does not apply (it returned None) is left out of the sum; if none applies, the
    response is unscored. If a function fails, the sum is unknown and the response has failed.
    """
    return [_sum_results(functions, parts) for parts in zip(*found, strict=True)]


def _sum_results(functions: Sequence[FunctionSpec], parts: Sequence[RewardResult]) -> RewardResult:
    extras, named = _merge_extras(functions, parts), len(functions) > 1
    scores = []
    for function, part in zip(functions, parts, strict=True):
        if part.reason in FAILURES:
            detail = f"{function.label}: {part.detail}" if named else part.detail
            return RewardResult(None, part.reason, detail[:DETAIL_CHARS], extras)
        if part.reward is not None:
            scores.append(function.weight * part.reward)
    if not scores:
        return RewardResult(None, "unscored", "", extras)
    total = sum(scores)
    if not math.isfinite(total):
        detail = f"the weighted sum of the scores is {total}"
        return RewardResult(None, "not-a-number", detail, extras)
    return RewardResult(total, "ok", "", extras)


def _merge_extras(functions: Sequence[FunctionSpec], parts: Sequence[RewardResult]) -> Extras:
    """Merge the scores and extras of several functions, by label."""
    if len(functions) == 1:
        return parts[0].extras
    found: Extras = {}
    for function, part in zip(functions, parts, strict=True):
        found |= {function.label: part.reward} if part.reward is not None else {}
    for function, part in zip(functions, parts, strict=True):
        found |= {f"{function.label}/{name}": value for name, value in part.extras.items()}
    return select_extras(found)


def _to_number(value: Any) -> float | None:
    """Convert a finite number, or an array or tensor of one, to a float; else return None."""
    shape = getattr(value, "shape", None)
    if not isinstance(value, numbers.Real) and shape is not None and math.prod(shape) == 1:
        value = value.item()
    try:
        finite = isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
    return float(value) if finite else None


def select_extras(values: Mapping[str, Any]) -> Extras:
    """Select the first EXTRAS_MAX entries that are numbers or text, which is cut short.

    Lists and tensors are dropped: they are neither metrics nor quickly read. verl's `pred` is text.
    """
    found: Extras = {}
    for name, value in values.items():
        text = replace_surrogates(value)[:TEXT_CHARS] if isinstance(value, str) else None
        kept = _to_number(value) if text is None else text
        if kept is not None and len(found) < EXTRAS_MAX:
            found[replace_surrogates(str(name))[:NAME_CHARS]] = kept
    return found


def select_numbers(extras: Extras) -> dict[str, float]:
    """Return the extras that can be metrics."""
    return {name: value for name, value in extras.items() if not isinstance(value, str)}


def format_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
