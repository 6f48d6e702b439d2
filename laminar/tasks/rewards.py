"""What passes between whoever wants a score and whoever gives it.

Gives   RewardSpec, RewardCall, RewardResult; what a function returned or raised, as a RewardResult
"""

from __future__ import annotations

import math
import numbers
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from laminar.tasks.prompts import PromptRow

DETAIL_CHARS = 240
FAILURES = ("error", "timeout", "not-a-number", "wrong-length")
"""It raised; ran too long; gave something else than a finite number; as a group function, gave no
list with an entry for each response. Such a response gets `reward.error_score`."""
HERE = Path(__file__).parent
"""What calls a function is not where it went wrong."""


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
    reason: str = "ok"  #: ok | unscored (the function returned None) | one of FAILURES
    detail: str = ""
    extras: dict[str, float] = {}  #: further figures that the function returned or logged


Scorer = Callable[[RewardCall], list[RewardResult]]


def describe(error: BaseException, path: str) -> str:
    """One short line: type, message, and the place in the user's file (else the innermost)."""
    lines = str(error).strip().splitlines()
    text = type(error).__name__ + (f": {lines[0]}" if lines else "")
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if Path(f.filename).parent != HERE]
    frames = [f for f in frames if f.filename == path] or frames
    if frames and not isinstance(error, SyntaxError):
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        return text[: DETAIL_CHARS - len(place)] + place
    return text[:DETAIL_CHARS]


def guarded(score: Callable[[], Any], path: str) -> RewardResult:
    """Call a function of the file `path`; whatever it raises is an error of this response."""
    try:
        return result_of(score())
    except BaseException as error:  # SystemExit too is the function's own failure
        return RewardResult(None, "error", describe(error, path))


def result_of(value: Any) -> RewardResult:
    """A function's return value as a result; what is no finite number is never made one."""
    extras: dict[str, float] = {}
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            detail = f"returned a dict without score: {listed(value)}"
            return RewardResult(None, "not-a-number", detail[:DETAIL_CHARS])
        extras = numbers_in({k: v for k, v in value.items() if k != "score"})
        value = value["score"]
    if value is None:
        return RewardResult(None, "unscored", "", extras)
    score = _number(value)
    if score is None:
        shown = reprlib.repr(value)
        detail = f"returned {shown} ({type(value).__name__}), which is not a finite number"
        return RewardResult(None, "not-a-number", " ".join(detail.split())[:DETAIL_CHARS], extras)
    return RewardResult(score, "ok", "", extras)


def _number(value: Any) -> float | None:
    """A finite number as a float, else None; scalars of NumPy and torch are numbers, too."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    try:
        finite = isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return None
    return float(value) if finite else None


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be a metric; text beside a score (verl's `pred`) is not one."""
    found = {str(key): _number(value) for key, value in values.items()}
    return {key: value for key, value in found.items() if value is not None}


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
