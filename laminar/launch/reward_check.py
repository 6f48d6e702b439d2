"""Trial of the reward before a run starts: three rows, each with the answer and an empty one.

Reads   the first training rows, the resolved scorer
Writes  the terminal: what each call returned
Gives   a warning, when correct answers fail, or score no more than empty ones
Raises  ConfigError when the scorer cannot be loaded, or no call of it gives a score

A reward that fails on everything, or gives every response the same, would waste an hour's run.
Therefore the user sees its scores first, and a run without any score is refused unless
reward.trial = false. A user's function runs in a worker process with its timeout, as in the run;
its printed output is discarded here. The built-in scorers need neither. The format that a user's
function expects is unknown, so it gets the answer in the usual forms; the form shown is one that
scores differently from an empty answer.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console

from laminar.config import ConfigError, RewardConfig
from laminar.events.reasons import RewardOutcome
from laminar.tasks.data.prompts import PromptRow, columns_of, from_plain
from laminar.tasks.rewards.results import (
    FAILURES,
    RewardCall,
    RewardResult,
    RewardSpec,
    RewardWorkerLost,
)
from laminar.tasks.rewards.reward_functions import describe_function, open_scorer
from laminar.tasks.rewards.worker_pool import RewardPool

ROWS = 3
SHOWN_CHARS = 60
FORMS = (
    "{}",
    "<answer>{}</answer>",
    "\\boxed{{{}}}",
    "#### {}",
    "<think>Some thoughts.</think><answer>{}</answer>",
    "<think>\nSome thoughts.\n</think>\n<answer>\n{}\n</answer>",
)
"""Forms in which an answer is passed to a user's function."""
NOT_TRIED = RewardResult(None, "not-tried", "an earlier call took too long")
Sample = Callable[[str], tuple[str, list[int]]]
"""A function from a text to the response of a model that writes it, as rewards are given it."""


def trial_calls(
    spec: RewardSpec, rows: Sequence[PromptRow], sample: Sample, group_size: int
) -> list[RewardCall]:
    """Build the calls: for each row its answer, if any, in one or several forms, then an empty one.

    A function of whole groups gets `group_size` siblings, as in the run, since it may rely on that;
    a row then takes as many calls as its forms need.
    """
    return [
        RewardCall(row, [sample(text) if text else ("", []) for text in texts])
        for row in rows[:ROWS]
        for texts in _build_texts(spec, row, group_size)
    ]


def _build_texts(spec: RewardSpec, row: PromptRow, group_size: int) -> list[list[str]]:
    """Return the texts of each call for a row; the last text of the last call is empty."""
    truth = from_plain(row.ground_truth)
    only_custom = all(function.kind == "custom" for function in spec.functions)
    forms = FORMS if only_custom else FORMS[1:2]
    texts = [form.format(truth) for form in forms] if truth is not None else []
    if spec.scope != "group":
        return [[*texts, ""]]
    room = max(group_size - 1, 1)
    parts = [texts[at : at + room] for at in range(0, len(texts), room)]
    if not parts or group_size == 1:
        parts.append([])
    return [[*part, *[""] * (group_size - len(part))] for part in parts]


def show_trial(
    spec: RewardSpec, reward: RewardConfig, calls: Sequence[RewardCall], console: Console
) -> dict[str, str]:
    """Call the reward and show the results; return warnings by kind."""

    def show(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    tried = _merge_rows(calls, list(_run_calls(spec, reward, calls)))
    show(
        f"reward     {_describe_functions(spec)}; called on {len(tried)} rows, with the answer "
        "in the data and "
        "with an empty one, it gives"
    )
    results: list[RewardResult] = []
    pairs: list[tuple[float | None, float | None]] = []
    failed: list[RewardResult] = []
    for call, found in tried:
        results += found
        for index in sorted({_find_best_call(found), len(found) - 1}):
            text, _ = call.completions[index]
            show(f"  row {call.row.index:<5}  {shorten_text(text)}: {_format_result(found[index])}")
        if found[1:]:  # else the data has no answer
            best = found[_find_best_call(found)]
            pairs.append((_get_score(best), _get_score(found[-1])))
            failed += [best] if has_failed(best) and best.reason != NOT_TRIED.reason else []
    if results and all(_get_score(result) is None for result in results):
        raise ConfigError(_no_score(spec, calls, results[0]))
    return (
        _find_failing_reward(pairs, failed, reward)
        or _find_flat_reward(pairs, calls)
        or _backward(pairs)
    )


def _merge_rows(
    calls: Sequence[RewardCall], results: Sequence[list[RewardResult]]
) -> list[tuple[RewardCall, list[RewardResult]]]:
    """Merge the calls of each row into one, with its answers and the last empty one."""
    merged = []
    for _, parts in itertools.groupby(zip(calls, results, strict=True), lambda p: id(p[0].row)):
        row_calls, found = zip(*parts, strict=True)
        texts = [text for call in row_calls for text in call.completions]
        all_found = list(itertools.chain(*found))
        kept = [i for i, (text, _) in enumerate(texts) if text or i == len(texts) - 1]
        call = RewardCall(row_calls[0].row, [texts[i] for i in kept])
        merged.append((call, [all_found[i] for i in kept]))
    return merged


def _find_failing_reward(
    pairs: Sequence[tuple[float | None, float | None]],
    failed: Sequence[RewardResult],
    reward: RewardConfig,
) -> dict[str, str]:
    """Return a warning if the function fails on correct answers and tells no others from empty."""
    if not failed or any(empty is None or right not in (None, empty) for right, empty in pairs):
        return {}
    return {
        "reward-fails": f"the reward fails on the answer in the data ({failed[0].reason}: "
        f"{failed[0].detail}), but not on an empty one, on {len(failed)} of the {len(pairs)} rows "
        "tried, and gives every other answer the score of an empty one: correct responses would "
        f"get reward.error_score = {reward.error_score:g}; correct the function"
    }


def _no_score(spec: RewardSpec, calls: Sequence[RewardCall], first: RewardResult) -> str:
    """Return the reason to refuse a run whose reward gave no score."""
    row, said = (calls[0].row, f"gave no score for any answer tried ({_format_result(first)})")
    insist = "or skip the trial with reward.trial = false"
    if row.ground_truth is not None:
        return f"{_describe_functions(spec)} {said}; correct it, {insist}"
    return (
        f"row {row.index} of {row.data_source} has no answer column ({columns_of(row)}), and "
        f"{_describe_functions(spec)} {said}; set data.answer_key, correct the function, {insist}"
    )


def _find_flat_reward(
    pairs: Sequence[tuple[float | None, float | None]], calls: Sequence[RewardCall]
) -> dict[str, str]:
    """Return a warning if correct and empty answers score the same on every row."""
    if not pairs or any(right is None or right != empty for right, empty in pairs):
        return {}
    row = next(call.row for call in calls if call.row.ground_truth is not None)
    return {
        "reward-flat": f"the reward gives {pairs[0][0]:g} to the answer in the data and the same "
        f"to an empty one, and so on each of the {len(pairs)} rows tried; if all responses get the "
        "same, the model learns nothing: check what the function compares the response with (row "
        f"{row.index} has the answer {_short_repr(from_plain(row.ground_truth))}), and whether it "
        "takes the response as text or as messages"
    }


def _find_best_call(found: Sequence[RewardResult]) -> int:
    """Return the index of the best score that differs from that of the empty answer.

    Without one, it is the first call that failed, if the empty one did not.
    """
    scores = [_get_score(result) for result in found]
    scored = [(score, -i) for i, score in enumerate(scores) if score not in (None, scores[-1])]
    if scored:
        return -max(scored)[1]
    failed = [i for i, result in enumerate(found) if has_failed(result)]
    return failed[0] if failed and not has_failed(found[-1]) else 0


def _backward(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, str]:
    """Return a warning if every correct answer scores less than the empty one."""
    known = [(right, empty) for right, empty in pairs if right is not None and empty is not None]
    if not known or not all(right < empty for right, empty in known):
        return {}
    right, empty = known[0]
    return {
        "reward-order": f"the reward gives {right:g} to the answer in the data and {empty:g} to an "
        f"empty one, and so on each of the {len(known)} rows tried, so the model learns to avoid "
        "correct answers: check the sign of the reward and the answer column"
    }


def has_failed(result: RewardResult) -> bool:
    return result.reason in (*FAILURES, "worker-lost", NOT_TRIED.reason)


def _get_score(result: RewardResult) -> float | None:
    """Return the function's score, or None where it failed (and has reward.error_score)."""
    return None if has_failed(result) else result.reward


def _run_calls(
    spec: RewardSpec, reward: RewardConfig, calls: Iterable[RewardCall]
) -> Iterator[list[RewardResult]]:
    """Yield the results; a worker also calls the built-in scorers for a thread.

    The time limit of math-verify is a signal, which only a main thread can have.
    """
    if not spec.custom and threading.current_thread() is threading.main_thread():
        scorer = open_scorer(spec)
        yield from (scorer(call) for call in calls)
    else:
        yield from asyncio.run(_in_worker(spec, reward, calls))


async def _in_worker(
    spec: RewardSpec, reward: RewardConfig, calls: Iterable[RewardCall]
) -> list[list[RewardResult]]:
    """Return the results; after the first timeout, the remaining calls are skipped."""
    pool = RewardPool(spec, timeout_s=reward.timeout_s, max_retries=0)
    try:
        await pool.start()
    except RewardWorkerLost as error:
        raise ConfigError(
            f"{_describe_functions(spec)} cannot be loaded: {error}; correct it"
        ) from None
    found: list[list[RewardResult]] = []
    late = False
    try:
        for call in calls:
            results = []
            for part in _split_call(spec, call):
                results += (
                    [NOT_TRIED] * len(part.completions) if late else await _score_call(pool, part)
                )
                late = late or any(result.reason == RewardOutcome.TIMEOUT for result in results)
            found.append(results)
    finally:
        await pool.close()
    return found


def _split_call(spec: RewardSpec, call: RewardCall) -> list[RewardCall]:
    """Return the calls of the function: one per group, or one per response."""
    if spec.scope == "group":
        return [call]
    return [RewardCall(call.row, [one]) for one in call.completions]


async def _score_call(pool: RewardPool, call: RewardCall) -> list[RewardResult]:
    try:
        return await pool.compute_rewards(call)
    except RewardWorkerLost as error:
        return [RewardResult(None, "worker-lost", str(error))] * len(call.completions)


def _describe_functions(spec: RewardSpec) -> str:
    whole = ", all siblings in one call" if spec.scope == "group" else ""
    if len(spec.functions) == 1:
        return describe_function(spec.functions[0]) + whole
    return " + ".join(f"{f.weight:g} * {describe_function(f)}" for f in spec.functions) + whole


def shorten_text(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _format_result(result: RewardResult) -> str:
    if has_failed(result):
        return f"FAILED, {result.reason}: {result.detail}"
    extras = "".join(f", {name} {_short_value(value)}" for name, value in result.extras.items())
    return ("None (it does not apply)" if result.reward is None else f"{result.reward:g}") + extras


def _short_value(value: float | str) -> str:
    return shorten_text(value) if isinstance(value, str) else f"{value:g}"
