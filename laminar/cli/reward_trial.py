"""The reward is called before a run starts: on three rows, with the right answer and an empty one.

Reads   the first training rows, the resolved scorer
Writes  the terminal: what each call returned
Gives   a warning, when the right answers score less than empty ones
Raises  ConfigError when the scorer cannot be loaded; whatever it returns ends nothing

A reward that fails on everything, or gives every answer the same, is a mistake of an hour's run; so
the user sees its scores first. A user's function runs in a worker process with its time-out, as in
the run; what it prints is dropped here. The scorers of this project need neither. How a user's
function wants its answers is not known, so it gets them in the usual forms; the one is shown that
makes a difference to an empty answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console

from laminar.config import ConfigError, RewardConfig
from laminar.tasks.prompts import PromptRow, restore
from laminar.tasks.reward_functions import described, open_scorer
from laminar.tasks.reward_pool import RewardPool
from laminar.tasks.rewards import (
    FAILURES,
    RewardCall,
    RewardResult,
    RewardSpec,
    RewardWorkerLost,
)

ROWS = 3
SHOWN_CHARS = 60
FORMS = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}")
"""In which an answer is written for a function of the user."""
NOT_TRIED = RewardResult(None, "not-tried", "an earlier call took too long")
Encode = Callable[[str], list[int]]


def trial_calls(spec: RewardSpec, rows: Sequence[PromptRow], encode: Encode) -> list[RewardCall]:
    """For each row the answer in the data, if there is one, in one form or several; last an empty
    answer."""
    return [
        RewardCall(row, [(text, encode(text) if text else []) for text in _texts(spec, row)])
        for row in rows[:ROWS]
    ]


def _texts(spec: RewardSpec, row: PromptRow) -> list[str]:
    truth = restore(row.ground_truth)
    if truth is None:
        return [""]
    only_custom = all(function.kind == "custom" for function in spec.functions)
    forms = FORMS if only_custom else FORMS[1:2]
    return [*(form.format(truth) for form in forms), ""]


def show_trial(
    spec: RewardSpec, reward: RewardConfig, calls: Sequence[RewardCall], console: Console
) -> dict[str, str]:
    """Call the reward and show what it returns; a warning by its kind, if there is reason."""

    def show(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    show(
        f"reward     {_name(spec)}; called on {len(calls)} rows, with the answer in the data and "
        "with an empty one, it gives"
    )
    results: list[RewardResult] = []
    pairs: list[tuple[float | None, float | None]] = []
    for call, found in zip(calls, _results(spec, reward, calls), strict=True):
        results += found
        for index in sorted({_telling(found), len(found) - 1}):
            text, _ = call.completions[index]
            show(f"  row {call.row.index:<5}  {_short(text)}: {_outcome(found[index])}")
        if found[1:]:  # else the data has no answer
            pairs.append((found[_telling(found)].score, found[-1].score))
    if results and all(failed(result) for result in results):
        show(f"  NO CALL GAVE A SCORE. {_consequence(reward)}")
    return _backward(pairs)


def _telling(found: Sequence[RewardResult]) -> int:
    """Which call shows what a right answer is worth: the best score that an empty one has not."""
    empty = found[-1].score
    scored = [i for i, r in enumerate(found) if r.score is not None and r.score != empty]
    return max(scored, key=lambda i: (found[i].score, -i), default=0)


def _backward(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, str]:
    """Of (right answer, empty answer): every right one is worth less."""
    known = [(right, empty) for right, empty in pairs if right is not None and empty is not None]
    if not known or not all(right < empty for right, empty in known):
        return {}
    right, empty = known[0]
    return {
        "reward-order": f"the reward gives {right:g} to the answer in the data and {empty:g} to an "
        f"empty one, and so on each of the {len(known)} rows tried, so the model learns to avoid "
        "right answers: look at the sign of the reward and at the answer column"
    }


def failed(result: RewardResult) -> bool:
    return result.reason in (*FAILURES, "worker-lost", NOT_TRIED.reason)


def _results(
    spec: RewardSpec, reward: RewardConfig, calls: Iterable[RewardCall]
) -> Iterator[list[RewardResult]]:
    if not spec.custom:
        scorer = open_scorer(spec)
        yield from (scorer(call) for call in calls)
    else:
        yield from asyncio.run(_in_worker(spec, reward, calls))


async def _in_worker(
    spec: RewardSpec, reward: RewardConfig, calls: Iterable[RewardCall]
) -> list[list[RewardResult]]:
    """Until a call takes too long: the start of a run does not wait for six of them."""
    pool = RewardPool(spec, timeout_s=reward.timeout_s, max_retries=0)
    try:
        await pool.start()
    except RewardWorkerLost as error:
        raise ConfigError(f"{_name(spec)} cannot be loaded: {error}; correct it") from None
    found: list[list[RewardResult]] = []
    late = False
    try:
        for call in calls:
            results = []
            for part in _parts(spec, call):
                results += [NOT_TRIED] * len(part.completions) if late else await _one(pool, part)
                late = late or any(result.reason == "timeout" for result in results)
            found.append(results)
    finally:
        await pool.close()
    return found


def _parts(spec: RewardSpec, call: RewardCall) -> list[RewardCall]:
    """The calls of the function that this means."""
    if spec.scope == "group":
        return [call]
    return [RewardCall(call.row, [one]) for one in call.completions]


async def _one(pool: RewardPool, call: RewardCall) -> list[RewardResult]:
    try:
        return await pool.score(call)
    except RewardWorkerLost as error:
        return [RewardResult(None, "worker-lost", str(error))] * len(call.completions)


def _name(spec: RewardSpec) -> str:
    whole = ", all siblings in one call" if spec.scope == "group" else ""
    if len(spec.functions) == 1:
        return described(spec.functions[0]) + whole
    return " + ".join(f"{f.weight:g} * {described(f)}" for f in spec.functions) + whole


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _outcome(result: RewardResult) -> str:
    if failed(result):
        return f"FAILED, {result.reason}: {result.detail}"
    extras = "".join(f", {name} {_short_value(value)}" for name, value in result.extras.items())
    return ("None (it does not apply)" if result.score is None else f"{result.score:g}") + extras


def _short_value(value: float | str) -> str:
    return _short(value) if isinstance(value, str) else f"{value:g}"


def _consequence(reward: RewardConfig) -> str:
    score = f"each answer would get reward.error_score = {reward.error_score:g}"
    if reward.max_error_share == 1:
        return f"If that goes on, {score}."
    share = f"reward.max_error_share = {reward.max_error_share:g}"
    return f"If that goes on, {score}, and {share} would end the run."
