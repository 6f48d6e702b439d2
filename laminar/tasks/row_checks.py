"""Checks of a run's rows before it starts.

Reads   the rows of load_prompts, the tokenizer, the reward functions, DataConfig
Gives   warnings by kind, each with a row and its value
Raises  ConfigError for rows that no run can use

chat.py finds rows that cannot be encoded, reward_functions.py those that cannot be scored. This
module finds rows that are valid but probably a mistake.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from laminar.config import ConfigError, DataConfig
from laminar.tasks.data.chat import encode_prompt, is_templated
from laminar.tasks.data.prompts import PromptRow, PromptSet, columns_of
from laminar.tasks.rewards.results import RewardSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_SAMPLED = 64
EVAL_SHARE_DIVISOR = 5
"""Inverse of the share of held-out rows that warns: mostly the default on a small file."""


def row_warnings(
    tokenizer: PreTrainedTokenizerBase, prompts: PromptSet, spec: RewardSpec, data: DataConfig
) -> dict[str, str]:
    """Return warnings about suspicious rows, by kind, a sentence each; raise ConfigError."""
    rows = [*prompts.train, *prompts.held_out]
    _check_roles(rows)
    if (messages := _first_messages(rows)) is not None:
        encode_prompt(tokenizer, messages, data)  # raises without a chat template
    return {
        **_warn_blank(rows),
        **_warn_no_answers(rows, spec),
        **_warn_answer_lists(rows, spec),
        **_warn_eval_share(prompts, data),
        **_warn_templated(tokenizer, prompts.train[:ROWS_SAMPLED], data),
    }


def _first_messages(rows: Sequence[PromptRow]) -> PromptRow | None:
    return next((row for row in rows if not isinstance(row.prompt, str)), None)


def _check_roles(rows: Sequence[PromptRow]) -> None:
    """Raise ConfigError if a prompt ends with a message of the assistant."""
    for row in rows:
        if not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant":
            raise ConfigError(
                f"{_describe_row(row)} has a prompt that ends with an assistant message, "
                f"{reprlib.repr(row.prompt[-1]['content'])}: the model would continue after its "
                "own response; remove that message, so that the last one is the user's"
            )


def _warn_blank(rows: Sequence[PromptRow]) -> dict[str, str]:
    """Warn of blank prompts; raise ConfigError if all prompts are blank."""
    found = [row for row in rows if not _get_prompt_text(row).strip()]
    if not found:
        return {}
    where = f"{_describe_row(found[0])} has the prompt {_get_prompt_text(found[0])!r}"
    if len(found) == len(rows):
        raise ConfigError(
            f"all {len(rows)} prompts are blank ({where}); set data.prompt_key to the column with "
            "the prompts, or correct the file"
        )
    return {
        "blank-prompts": f"{len(found)} of {len(rows)} prompts are blank: {where}; drop such rows, "
        "or fill them"
    }


def _get_prompt_text(row: PromptRow) -> str:
    """Return the text of the prompt, or of its last message."""
    return row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1]["content"])


def _warn_no_answers(rows: Sequence[PromptRow], spec: RewardSpec) -> dict[str, str]:
    """Warn of rows without an answer if a verl-style function expects ground_truth.

    The built-in scorers refuse such rows.
    """
    found = [row for row in rows if row.ground_truth is None]
    if not found or not any(function.style == "verl" for function in spec.functions):
        return {}
    return {
        "no-answers": (
            f"{len(found)} of {len(rows)} rows have no answer: {_describe_row(found[0])} has "
            f"none ({columns_of(found[0])}), and the reward function gets ground_truth = None; "
            "name its column by data.answer_key if it needs one"
        )
    }


def _warn_answer_lists(rows: Sequence[PromptRow], spec: RewardSpec) -> dict[str, str]:
    """Warn of list answers if a custom function gets them; built-in scorers refuse lists."""
    found = [row for row in rows if isinstance(row.ground_truth, list)]
    if not found or not spec.custom:
        return {}
    return {
        "answer-lists": f"{len(found)} of {len(rows)} answers are lists: "
        f"{_describe_row(found[0])} has "
        f"{reprlib.repr(found[0].ground_truth)}, and the reward function gets the list; if it "
        "compares with text, write the answer as text or name another column by data.answer_key"
    }


def _warn_eval_share(prompts: PromptSet, data: DataConfig) -> dict[str, str]:
    """Warn of a large share of held-out rows, unless data.val_files is set."""
    held_out = len(prompts.held_out)
    total = len(prompts.train) + held_out + prompts.overlap
    if data.val_files or EVAL_SHARE_DIVISOR * held_out <= total:
        return {}
    return {
        "held-out": f"data.val_size = {data.val_size} holds out {held_out} of {total} rows, "
        f"{held_out / total:.0%} of the data, and {len(prompts.train)} are left for training; "
        f"lower it to {max(total // 10, 1)}, say, or give data.val_files"
    }


def _warn_templated(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow], data: DataConfig
) -> dict[str, str]:
    """Warn if most prompts already contain the chat template's text."""
    count = sum(is_templated(tokenizer, row, data) for row in rows)
    if 2 * count <= len(rows):
        return {}
    return {
        "template": (
            f"{count} of the first {len(rows)} prompts already contain the text of the chat "
            "template, which would be applied twice: give the user's message without it, or "
            "set data.apply_chat_template = false; `prompt 0` of `laminar train --dry-run` "
            "shows what the model sees"
        )
    }


def _describe_row(row: PromptRow) -> str:
    return f"row {row.index} of {row.data_source}"
