"""The built-in scorers: of a reasoning-gym dataset, of mathematics, of exact answers.

Each is opened once per worker and returns a function (row, response) -> number or RewardResult.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

from laminar.tasks.data.prompts import PromptRow, make_dataset
from laminar.tasks.rewards.results import FunctionSpec, RewardResult

_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_TEXT_COMMAND = re.compile(r"\\(?:text\w*|mathrm|mbox)\b|\\[,;! ]")
_COMMAND = re.compile(r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+")
_LETTER_UNIT = re.compile(r"(?=[^a-z]*\d)[-+\d.,/{}$\s]*+([a-z])[}$.\s]*")
_ONLY_WORDS = re.compile(r"(?:[^\W\d_]|[\s.!?'\"{}$])*")


def dataset_scorer(spec: FunctionSpec) -> Callable[[PromptRow, str], Any]:
    from laminar.tasks.data.gym import extract_answer

    dataset = make_dataset(spec.dataset, spec.dataset_config, size=1, seed=0)
    return lambda row, text: dataset.score_answer(extract_answer(text), row.columns)


def exact_scorer(_spec: FunctionSpec) -> Callable[[PromptRow, str], Any]:
    def score(row: PromptRow, text: str) -> float:
        tagged = _find_tagged_answer(text)
        answer = text if tagged is None else tagged
        return float(answer.strip() == str(row.ground_truth).strip())

    return score


def math_scorer(_spec: FunctionSpec) -> Callable[[PromptRow, str], Any]:
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
            except Exception:  # SymPy raises many types if it cannot compare
                continue
        return late or 0.0

    def score(row: PromptRow, text: str) -> float | RewardResult:
        truth = _math_text(str(row.ground_truth))
        gold = parse(truth)
        if not gold:
            raise ValueError(f"the ground truth {row.ground_truth!r} is not a mathematical answer")
        tagged = _find_tagged_answer(text)
        try:
            found = parse(text if tagged is None else _math_text(tagged), raise_on_error=True)
        except TimeoutException:
            return RewardResult(None, "timeout", "math-verify: timeout during parsing")
        except Exception:  # an answer that cannot be parsed is wrong
            return 0.0
        answer = _find_boxed(text if tagged is None else _math_text(tagged))
        if answer is None:
            answer = next((one for one in reversed(found) if isinstance(one, str)), "")
        same = _compare_words(_find_boxed(truth) or truth, answer)
        return equal(gold, found) if same is None else float(same)

    return score


def _math_text(answer: str) -> str:
    """Put a bare answer in a box, so that LaTeX without dollars is parsed; cut its working."""
    answer = answer.rpartition("####")[2].strip()
    if len(boxes := _BOXED.findall(answer)) == 1:
        return f"\\boxed{{{boxes[0]}}}"
    marked = any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\["))
    return answer if marked else f"\\boxed{{{answer}}}"


def _find_boxed(text: str) -> str | None:
    found = _BOXED.findall(text)
    return found[-1] if found else None


def _compare_words(truth: str, answer: str) -> bool | None:
    """Return whether both say the same words; None if mathematics decides.

    math-verify reads a word as the product of its letters, and drops units. Answers without
    words, and those with the same words and something else, are left to it.
    """
    truth, answer = (_TEXT_COMMAND.sub("", text).casefold() for text in (truth, answer))
    expected, found = _split_phrases(truth), _split_phrases(answer)
    if not expected or not found:
        return None
    if expected != found:
        return False
    return True if _ONLY_WORDS.fullmatch(truth) and _ONLY_WORDS.fullmatch(answer) else None


def _split_phrases(answer: str) -> list[str]:
    """Return the phrases with a word of two letters or more, sorted, or a unit of one letter."""
    plain = _COMMAND.sub(" ", answer)
    if unit := _LETTER_UNIT.fullmatch(plain):
        return [unit[1]]
    phrases = re.split(r"\b(?:and|or)\b|[^\w\s]|[\d_]", plain)
    return sorted(" ".join(p.split()) for p in phrases if re.search(r"[^\W\d_]{2}", p))


def _find_tagged_answer(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1] if found else None
