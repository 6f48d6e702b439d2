"""What is said of the rows before a run starts: a refusal, a warning, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laminar.config import ConfigError, resolve_config
from laminar.tasks.data.prompts import load_prompts
from laminar.tasks.data.tokenizer import load_tokenizer
from laminar.tasks.rewards.reward_functions import check_rows, reward_spec
from laminar.tasks.row_checks import row_warnings

MODEL = Path(__file__).parents[2] / "configs" / "models" / "spell-0.6m"
USER = {"role": "user", "content": "2+2?"}


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


def warned(
    tokenizer: Any, tmp_path: Path, rows: list[dict[str, Any]], *, reward: str = "", **data: Any
) -> dict[str, str]:
    """The warnings about the rows as a file d.jsonl; `reward`: a user's file."""
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flat: dict[str, Any] = {"model.name": str(MODEL), "data.train_files": [str(file)]}
    flat |= {f"data.{key}": value for key, value in ({"val_size": 0} | data).items()}
    if reward:
        (tmp_path / "reward.py").write_text(reward)
        flat["reward.custom_reward_function.path"] = str(tmp_path / "reward.py")
    config = resolve_config(flat)
    prompts, spec = load_prompts(config.data), reward_spec(config)
    check_rows(spec, [*prompts.train, *prompts.held_out])
    return row_warnings(tokenizer, prompts, spec, config.data)


def refused(tokenizer: Any, tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        warned(tokenizer, tmp_path, rows, **data)
    return str(caught.value)


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(count)]


def test_ordinary_rows_are_not_warned_of(tokenizer: Any, tmp_path: Path) -> None:
    assert warned(tokenizer, tmp_path, sums(10), val_size=2) == {}
    chat = [{"prompt": [USER], "answer": "4"}]
    assert warned(tokenizer, tmp_path, chat) == {}


def test_a_missing_answer_column_is_named(tokenizer: Any, tmp_path: Path) -> None:
    said = refused(tokenizer, tmp_path, [{"prompt": "2+2?", "solution": "4", "level": 3}])
    assert "row 0 of d has no answer (it has solution, level)" in said
    assert "the math scorer" in said and "data.answer_key" in said and "None" not in said


def test_a_function_that_wants_an_answer_and_gets_none(tokenizer: Any, tmp_path: Path) -> None:
    """It may do without; one that takes no ground_truth is not warned of."""
    verl = "def f(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
    rows = [*sums(1), {"prompt": "2+2?", "solution": "4"}]
    found = warned(tokenizer, tmp_path, rows, reward=verl)
    assert list(found) == ["no-answers"]
    assert (
        "1 of 2 rows have no answer: row 1 of d has none (it has solution)" in found["no-answers"]
    )
    alone = "def f(completion): return float(len(completion))\n"
    assert warned(tokenizer, tmp_path, rows, reward=alone) == {}


def test_blank_prompts(tokenizer: Any, tmp_path: Path) -> None:
    rows = [*sums(3), {"prompt": " \n", "answer": "4"}]
    found = warned(tokenizer, tmp_path, rows)
    assert list(found) == ["blank-prompts"]
    assert "1 of 4 prompts are blank: row 3 of d has the prompt ' \\n'" in found["blank-prompts"]
    rows = [{"prompt": [{"role": "user", "content": ""}], "answer": "4"}]
    assert "all 1 prompts are blank (row 0 of d" in refused(tokenizer, tmp_path, rows)


def test_a_prompt_that_ends_with_the_answer(tokenizer: Any, tmp_path: Path) -> None:
    answered = [USER, {"role": "assistant", "content": "4"}]
    rows = [{"prompt": [USER], "answer": "4"}, {"prompt": answered, "answer": "4"}]
    said = refused(tokenizer, tmp_path, rows)
    assert "row 1 of d has a prompt that ends with an assistant message, '4'" in said
    assert warned(tokenizer, tmp_path, [{"prompt": [*answered, USER], "answer": "4"}]) == {}


def test_answers_that_are_lists(tokenizer: Any, tmp_path: Path) -> None:
    """A scorer of ours refuses them; a user's function may take them."""
    rows = [*sums(1), {"prompt": "4?", "answer": ["4", "four"]}]
    said = refused(tokenizer, tmp_path, rows)
    assert "row 1 of d has the answer ['4', 'four']" in said and "data.answer_key" in said
    found = warned(tokenizer, tmp_path, rows, reward="def f(completion, answer): return 1.0\n")
    assert list(found) == ["answer-lists"]
    assert "1 of 2 answers are lists: row 1 of d has ['4', 'four']" in found["answer-lists"]


def test_more_than_a_fifth_held_out(tokenizer: Any, tmp_path: Path) -> None:
    found = warned(tokenizer, tmp_path, sums(20), val_size=5)
    assert list(found) == ["held-out"]
    assert "data.val_size = 5 holds out 5 of 20 rows, 25%" in found["held-out"]
    assert warned(tokenizer, tmp_path, sums(20), val_size=4) == {}
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "9+1?", "answer": "10"}\n' * 9)
    assert warned(tokenizer, tmp_path, sums(9), val_files=[str(held_out)]) == {}


def test_messages_without_a_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    """Also where only a later row has them."""
    tokenizer.chat_template = None
    said = refused(tokenizer, tmp_path, [*sums(2), {"prompt": [USER], "answer": "4"}])
    assert "row 2" in said and "no chat template" in said


def test_prompts_that_went_through_the_template(tokenizer: Any, tmp_path: Path) -> None:
    """White space around a prompt is no sign of it: the shipped template adds nothing else."""
    rows = [{"prompt": f"say {n}\n", "answer": f"{n}"} for n in range(4)]
    assert warned(tokenizer, tmp_path, rows) == {}
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}"
    rows = [{"prompt": f"Q: say {n}\nA:", "answer": f"{n}"} for n in range(4)]
    found = warned(tokenizer, tmp_path, rows)
    assert list(found) == ["template"] and "4 of the first 4" in found["template"]
