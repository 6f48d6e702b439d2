"""What passes between the code that wants a score and the code that gives it.

Gives   RewardSpec, RewardCall, RewardResult, RewardWorkerLost; what a function returned or raised,
        as a RewardResult; one result from those of several functions

What a function gives besides the score is kept with it, as far as it is small: numbers become
metrics, text is there for people who look at a sample.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from laminar.run.user_file import DETAIL_CHARS, describe_error
from laminar.tasks.data.prompts import PromptRow

FAILURES = ("error", "timeout", "not-a-number", "wrong-length")
"""It raised; ran too long; gave something else than a finite number; as a group function, gave no
list with an entry for each response. Such a response gets `reward.error_score`."""
FULL_SCORE = 1.0
"""Several datasets give partial credit to wrong answers: right means the full score."""
EXTRAS_MAX = 32
"""Names beside one score, the first ones: each is a metric."""
NAME_CHARS, TEXT_CHARS = 64, 256

Extras = dict[str, float | str]


class RewardWorkerLost(RuntimeError):
    """The infrastructure failed, again and again: there is no score, not even a bad one."""


class FunctionSpec(msgspec.Struct, frozen=True):
    """One reward function, resolved: all that a worker process needs to open it."""

    kind: str  #: dataset | math | exact | custom
    style: str = ""  #: of a custom function: verl | group | single
    path: str = ""  #: absolute
    name: str = ""
    dataset: str = ""
    dataset_config: dict[str, Any] = {}
    weight: float = 1.0  #: of its score in the sum
    label: str = ""  #: its name among several


class RewardSpec(msgspec.Struct, frozen=True):
    """What scores a response: the weighted sum of these functions, mostly of one."""

    scope: str  #: trajectory (one call per response) | group (one call for all siblings)
    functions: list[FunctionSpec]

    @property
    def custom(self) -> bool:
        """Whether code of the user is among them."""
        return any(function.kind == "custom" for function in self.functions)


class RewardCall(msgspec.Struct, frozen=True):
    """Responses to one prompt that want scores."""

    row: PromptRow
    completions: list[tuple[str, list[int]]]  #: text and token ids of each response
    step: int = 0  #: completed steps, shown to a TRL function as trainer_state.global_step


class RewardResult(msgspec.Struct, frozen=True):
    score: float | None
    reason: str = "ok"  #: ok | unscored (the function returned None) | one of FAILURES
    detail: str = ""
    extras: Extras = {}  #: what else the function returned or logged, within EXTRAS_MAX


Scorer = Callable[[RewardCall], list[RewardResult]]


def is_correct(score: float, *, truncated: bool) -> bool:
    """The full score, for an answer that came to its end: one that was cut off is wrong."""
    return score >= FULL_SCORE and not truncated


def call_guarded(score: Callable[[], Any], path: str) -> RewardResult:
    """Call a function of the file `path`; whatever it raises is an error of this response."""
    try:
        return parse_result(score())
    except BaseException as error:  # SystemExit too is the function's own failure
        return RewardResult(None, "error", describe_error(error, path))


def apply_error_score(result: RewardResult, error_score: float) -> RewardResult:
    """The result, with the score that a failure gets."""
    if result.reason in FAILURES:
        return msgspec.structs.replace(result, score=error_score)
    return result


def parse_result(value: Any) -> RewardResult:
    """A function's return value as a result; what is no finite number is never made one."""
    extras: Extras = {}
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = {**value[1], "score": value[0]}
    if isinstance(value, Mapping):
        if "score" not in value:
            detail = f"returned a dict without score: {format_names(value)}"
            return RewardResult(None, "not-a-number", detail[:DETAIL_CHARS])
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
    """One result for each response: the weighted sum of what every function found for it.

    A function that does not apply (it gave None) is left out of the sum; where none applies there
    is no score. Where one fails, the sum is unknown: the answer has failed.
    """
    return [_sum_results(functions, parts) for parts in zip(*found, strict=True)]


def _sum_results(functions: Sequence[FunctionSpec], parts: Sequence[RewardResult]) -> RewardResult:
    extras, named = _merge_extras(functions, parts), len(functions) > 1
    scores = []
    for function, part in zip(functions, parts, strict=True):
        if part.reason in FAILURES:
            detail = f"{function.label}: {part.detail}" if named else part.detail
            return RewardResult(None, part.reason, detail[:DETAIL_CHARS], extras)
        if part.score is not None:
            scores.append(function.weight * part.score)
    if not scores:
        return RewardResult(None, "unscored", "", extras)
    total = sum(scores)
    if not math.isfinite(total):
        detail = f"the weighted sum of the scores is {total}"
        return RewardResult(None, "not-a-number", detail, extras)
    return RewardResult(total, "ok", "", extras)


def _merge_extras(functions: Sequence[FunctionSpec], parts: Sequence[RewardResult]) -> Extras:
    """The extras of several functions: each one's score, and what it gave besides, by its label."""
    if len(functions) == 1:
        return parts[0].extras
    found: Extras = {}
    for function, part in zip(functions, parts, strict=True):
        found |= {function.label: part.score} if part.score is not None else {}
    for function, part in zip(functions, parts, strict=True):
        found |= {f"{function.label}/{name}": value for name, value in part.extras.items()}
    return select_extras(found)


def _to_number(value: Any) -> float | None:
    """A finite number as a float, else None; so is an array or a tensor of one entry."""
    shape = getattr(value, "shape", None)
    if not isinstance(value, numbers.Real) and shape is not None and math.prod(shape) == 1:
        value = value.item()
    try:
        finite = isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
    return float(value) if finite else None


def select_extras(values: Mapping[str, Any]) -> Extras:
    """The entries worth keeping: numbers as floats, text cut short (verl's `pred`); the first ones.

    Nothing else is: a list or a tensor beside a score is neither a metric nor quickly read.
    """
    found: Extras = {}
    for name, value in values.items():
        kept = value[:TEXT_CHARS] if isinstance(value, str) else _to_number(value)
        if kept is not None and len(found) < EXTRAS_MAX:
            found[str(name)[:NAME_CHARS]] = kept
    return found


def select_numbers(extras: Extras) -> dict[str, float]:
    """The extras that can be a metric."""
    return {name: value for name, value in extras.items() if not isinstance(value, str)}


def format_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
