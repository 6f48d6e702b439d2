"""The held-out score by prompt length adds up to the score, and equal lengths stay together."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.analysis.facts.reader import load_facts
from laminar.analysis.report.prompt_lengths import by_prompt_length, split_by_length
from laminar.analysis.report.summary import summarize_run
from laminar.analysis.report.summary_lines import range_line
from laminar.storage import messages as m
from tools.kit import run_directory
from tools.kit.run_directory import make_run, world_log


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([7, 7, 7], [(7, 7)]),
        ([1, 2], [(1, 1), (2, 2)]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [(1, 2), (3, 4), (5, 6), (7, 8)]),
        ([1, 5, 5, 5, 5, 5, 5, 9], [(1, 5), (9, 9)]),
        ([3] * 9 + [4], [(3, 3), (4, 4)]),
    ],
)
def test_ranges_hold_every_length_once(lengths: list[int], expected: list[tuple[int, int]]) -> None:
    assert [(part[0], part[-1]) for part in split_by_length(lengths, int, 4)] == expected


def test_the_parts_add_up_to_the_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out prompts have 1 to 4 tokens."""

    def prompt(index: int) -> m.PromptPayload:
        ids = b"\1\0\0\0" * (index % 4 + 1)
        return m.PromptPayload(
            prompt="", ground_truth="", columns={}, data_source="made", prompt_ids=ids
        )

    monkeypatch.setattr(run_directory, "_prompt", prompt)
    make_run(tmp_path / "run", world_log())
    summary = summarize_run(tmp_path / "run")
    found = summary["eval_by_prompt_length"]
    assert [r["prompt_tokens_min"] for r in found] == [1, 2, 3, 4]
    evaluations = (summary["evaluations"][0], summary["evaluations"][-1])
    for which, evaluation in zip(("first", "last"), evaluations, strict=True):
        assert sum(r[f"{which}_total"] for r in found) == evaluation["total"]
        assert sum(r[f"{which}_correct"] for r in found) == evaluation["correct"]
    facts = load_facts(tmp_path / "run")
    rows = facts.rows("trajectories", ["trajectory", "correct"])
    wrong = {row["trajectory"]: row["correct"] for row in rows if row["trajectory"] != "e2.3.0"}
    told = by_prompt_length(tmp_path / "run", facts.state.evaluations.results, wrong)
    assert (told[-1]["first_total"], told[-1]["last_total"]) == (1, 0)


def test_a_range_is_one_line() -> None:
    counts = {"first_correct": 1, "first_total": 4, "last_correct": 3, "last_total": 4}
    assert range_line({"prompt_tokens_min": 5, "prompt_tokens_max": 9, **counts}) == (
        "5-9 tokens 0.25 -> 0.75 (4)"
    )
    one = {"prompt_tokens_min": 5, "prompt_tokens_max": 5, **counts, "last_total": 0}
    assert range_line(one) == "5 tokens 0.25 (0)"
