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


def dataset_scorer(spec: FunctionSpec) -> Callable[[PromptRow, str], Any]:
    from reasoning_gym.utils import extract_answer

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
        gold = parse(_math_text(str(row.ground_truth)))
        if not gold:
            raise ValueError(f"the ground truth {row.ground_truth!r} is not a mathematical answer")
        tagged = _find_tagged_answer(text)
        try:
            found = parse(text if tagged is None else _math_text(tagged), raise_on_error=True)
        except TimeoutException:
            return RewardResult(None, "timeout", "math-verify: timeout during parsing")
        except Exception:  # an answer that cannot be parsed is wrong
            return 0.0
        return equal(gold, found)

    return score


def _math_text(answer: str) -> str:
    """Put a bare answer in a box, so that LaTeX without dollars is parsed; cut GSM8K's working."""
    answer = answer.rpartition("####")[2].strip()
    marked = any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\["))
    return answer if marked else f"\\boxed{{{answer}}}"


def _find_tagged_answer(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1] if found else None
