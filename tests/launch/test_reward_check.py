"""What is shown of the reward before a run starts, and what ends the start."""

from __future__ import annotations

import io
import textwrap
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laminar.config import ConfigError, DataConfig, resolve_config
from laminar.launch.reward_check import FORMS, show_trial, trial_calls
from laminar.tasks.data.prompts import PromptRow, load_prompts
from laminar.tasks.rewards.reward_functions import reward_spec

pytestmark = pytest.mark.process

ROWS = [PromptRow(i, "2+2?", str(i), {}, "sums") for i in range(5)]


def shown(tmp_path: Path, source: str, rows: list[PromptRow] = ROWS, **reward: Any) -> list[str]:
    """The lines on the terminal."""
    return tried(tmp_path, source, rows, **reward)[0]


def tried(
    tmp_path: Path, source: str, rows: list[PromptRow] = ROWS, **reward: Any
) -> tuple[list[str], dict[str, str]]:
    """The lines on the terminal, and the warnings."""
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(source))
    flat = {"model.name": "m", "data.train_files": ["t.jsonl"]}
    flat |= {f"reward.{key}": value for key, value in reward.items()}
    config = resolve_config({**flat, "reward.custom_reward_function.path": str(path)})
    spec, out = reward_spec(config), io.StringIO()
    calls = trial_calls(spec, rows, lambda t: (t, [*map(ord, t)]), config.rollout.group_size)
    found = show_trial(spec, config.reward, calls, Console(file=out, soft_wrap=True))
    return out.getvalue().splitlines(), found


def test_three_rows_with_the_right_answer_and_an_empty_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the file prints, when it is imported or called, is not for this terminal."""
    source = """
        print("imported")
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            print("called")
            return solution_str == ground_truth if solution_str else None
    """
    first, *lines = shown(tmp_path, source)
    assert "compute_score of" in first and "3 rows" in first
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "'0': 1", "'': None (it does not apply)",
        "'1': 1", "'': None (it does not apply)",
        "'2': 1", "'': None (it does not apply)",
    ]  # fmt: skip
    assert capfd.readouterr() == ("", "")


def test_a_group_function_gets_all_as_siblings(tmp_path: Path) -> None:
    source = """
        def f(prompts, completions, completion_ids, **columns):
            return [len(completions) + len(ids) for ids in completion_ids]
    """
    _, *lines = shown(tmp_path, source, ROWS[:1])
    assert [line.split(": ", 1)[1] for line in lines] == ["60", "8"]


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_a_group_function_is_called_with_as_many_siblings_as_in_the_run(
    tmp_path: Path, group_size: int
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(f"def f(prompts, completions):\n    assert len(completions) == {group_size}\n")
    flat = {"model.name": "m", "reward.custom_reward_function.path": str(path)}
    spec = reward_spec(resolve_config({**flat, "data.train_files": ["t.jsonl"]}))
    calls = trial_calls(spec, ROWS[:1], lambda text: (text, [1]), group_size)
    texts = [[text for text, _ in call.completions] for call in calls]
    assert {len(part) for part in texts} == {group_size} and {part[-1] for part in texts} == {""}
    assert texts[0][0] == "0" and sum(map(bool, chain(*texts))) == len(FORMS)


TAGGED = """
    import re
    def f(completion, answer):
        found = re.findall("<answer>(.*?)</answer>", completion)
        return {}
"""


def test_the_form_is_shown_that_makes_a_difference(tmp_path: Path) -> None:
    lines, warnings = tried(tmp_path, TAGGED.format("float(found == [answer])"))
    assert [line.split(maxsplit=2)[2] for line in lines[1:3]] == [
        "'<answer>0</answer>': 1",
        "'': 0",
    ]
    assert len(lines) == 7 and warnings == {}


@pytest.mark.parametrize("value", ["-float(found == [answer])", "1 - float(found == [answer])"])
def test_right_answers_that_score_less_than_empty_ones(tmp_path: Path, value: str) -> None:
    _, warnings = tried(tmp_path, TAGGED.format(value))
    assert list(warnings) == ["reward-order"]
    assert "each of the 3 rows" in warnings["reward-order"]


@pytest.mark.parametrize(
    "value",
    [
        "-1.0 if not found else 1.0",  # a wrong form costs, the right one does not
        "-1.0 if found == ['1'] else 0.0",  # of one row only
    ],
)
def test_other_rewards_are_not_warned_of(tmp_path: Path, value: str) -> None:
    assert tried(tmp_path, TAGGED.format(value))[1] == {}


@pytest.mark.parametrize("value", ["1.0", "0.0", "None if found else 0.0"])
def test_right_answers_that_score_as_empty_ones_do(tmp_path: Path, value: str) -> None:
    _, warnings = tried(tmp_path, TAGGED.format(value))
    assert list(warnings) == ["reward-flat"]
    said = warnings["reward-flat"]
    assert "each of the 3 rows" in said and "row 0 has the answer '0'" in said


def test_a_list_as_the_answer_makes_no_difference_to_text(tmp_path: Path) -> None:
    rows = [PromptRow(i, "2+2?", [str(i), "x"], {"answer": [str(i), "x"]}, "sums") for i in (0, 1)]
    source = "def f(completion, answer): return float(completion == answer)"
    _, warnings = tried(tmp_path, source, rows)
    assert list(warnings) == ["reward-flat"]
    assert "row 0 has the answer ['0', 'x']" in warnings["reward-flat"]


def refused(tmp_path: Path, source: str, rows: list[PromptRow] = ROWS, **reward: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        tried(tmp_path, source, rows, **reward)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_score_at_all_ends_the_start_with_the_line_of_the_users_file(tmp_path: Path) -> None:
    source = "def f(completions):\n    return [{}[c] for c in completions]"
    said = refused(tmp_path, source)
    assert "f of " in said and "gave no score" in said and "reward.trial = false" in said
    assert "FAILED, error: KeyError: '0' (reward.py:2)" in said and "answer column" not in said


def test_a_function_that_applies_to_nothing_ends_the_start(tmp_path: Path) -> None:
    assert "None (it does not apply)" in refused(tmp_path, "def f(completion): return None")


def test_without_an_answer_the_columns_are_named(tmp_path: Path) -> None:
    rows = [PromptRow(7, "2+2?", None, {"solution": "4", "level": 3}, "sums")]
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return ground_truth.strip() in solution_str
    """
    said = refused(tmp_path, source, rows)
    assert "row 7 of sums has no answer column (it has solution, level)" in said
    assert "set data.answer_key" in said


def test_one_failure_of_several_is_no_reason_for_alarm(tmp_path: Path) -> None:
    lines, warnings = tried(tmp_path, "def f(completion): return 1 / len(completion)")
    assert sum("ZeroDivisionError" in line for line in lines) == 3
    assert len(lines) == 7 and warnings == {}


@pytest.mark.parametrize("right", ["answer in completion", "f'<answer>{answer}</' in completion"])
def test_a_function_that_fails_when_the_answer_is_right(tmp_path: Path, right: str) -> None:
    source = f"def f(completion, answer, info): return info['turns'] if {right} else 0.0"
    lines, warnings = tried(tmp_path, source, error_score=-0.5)
    assert sum("FAILED, error: KeyError: 'turns'" in line for line in lines) == 3
    assert list(warnings) == ["reward-fails"]
    said = warnings["reward-fails"]
    assert "KeyError: 'turns' (reward.py:1)" in said and "reward.error_score = -0.5" in said
    assert "3 of the 3 rows" in said


def test_a_function_that_fails_on_some_rows_and_is_flat_on_the_others(tmp_path: Path) -> None:
    source = "def f(completion, answer): return 1 / 0 if '1' in completion else 0.0"
    _, warnings = tried(tmp_path, source)
    assert list(warnings) == ["reward-fails"] and "1 of the 3 rows" in warnings["reward-fails"]


@pytest.mark.parametrize("group_size", [1, 2, 4, 16])
@pytest.mark.parametrize(
    "layout",
    [
        r"^<think>.*?</think>\s*<answer>.*?</answer>$",
        r"^<think>.*?</think><answer>.*?</answer>$",
        r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$",
    ],
)
def test_the_layout_of_r1_is_among_the_forms(tmp_path: Path, layout: str, group_size: int) -> None:
    """A group function has as many siblings as in the run, so it may take several calls."""
    source = f"""
        import re
        def f(completions, **columns):
            return [float(bool(re.match({layout!r}, c, re.DOTALL))) for c in completions]
    """
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(source))
    flat = {"model.name": "m", "data.train_files": ["t.jsonl"]}
    config = resolve_config({**flat, "reward.custom_reward_function.path": str(path)})
    spec, out = reward_spec(config), io.StringIO()
    calls = trial_calls(spec, ROWS, lambda text: (text, [1]), group_size)
    found = show_trial(spec, config.reward, calls, Console(file=out, soft_wrap=True))
    assert found == {} and "called on 3 rows" in out.getvalue()
    assert len(out.getvalue().splitlines()) == 7


def test_a_function_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    source = "def f(completion):\n    while completion == '': pass\n    return 1.0"
    _, *lines = shown(tmp_path, source, timeout_s=0.3)
    assert [line.split(": ", 1)[1] for line in lines[:3]] == [
        "1",
        "FAILED, timeout: no result within 0.3 s",
        "FAILED, not-tried: an earlier call took too long",
    ]
    assert len(lines) == 6


def test_a_worker_that_dies_on_one_answer_is_no_end_of_the_start(tmp_path: Path) -> None:
    source = "import os\ndef f(completion): return 1.0 if completion else os._exit(3)"
    lines = shown(tmp_path, source, ROWS[:1])
    assert "FAILED, worker-lost" in lines[2] and "exit code 3" in lines[2]


def test_a_file_that_loads_here_and_not_in_a_worker_is_an_error(tmp_path: Path) -> None:
    source = f"""
        import os
        if os.getpid() != {__import__("os").getpid()}:
            os._exit(4)
        def f(completion): return 1.0
    """
    with pytest.raises(ConfigError, match=r"f of .*reward\.py cannot be loaded: .*exit code 4"):
        shown(tmp_path, source)


def test_a_row_without_an_answer_has_only_the_empty_one(tmp_path: Path) -> None:
    rows = [PromptRow(0, "q", None, {}, "d")]
    lines, warnings = tried(tmp_path, "def f(completion): return 0.0", rows)
    assert len(lines) == 2 and warnings == {}


def test_the_scorer_of_a_dataset_gets_the_answer_as_it_wants_it() -> None:
    data = DataConfig(dataset="spell_backward", dataset_size=3, val_size=0)
    config = resolve_config({"model.name": "m", "data.dataset": "spell_backward"})
    spec, out = reward_spec(config), io.StringIO()
    calls = trial_calls(spec, load_prompts(data).train, lambda text: (text, []), 4)
    show_trial(spec, config.reward, calls, Console(file=out, soft_wrap=True))
    _, *lines = out.getvalue().splitlines()
    assert [line.rsplit(": ")[-1] for line in lines] == ["1", "0"] * 3
