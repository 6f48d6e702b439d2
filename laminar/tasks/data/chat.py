"""Encoding of prompt rows to the token ids that the engine starts from.

Reads   PromptRow, the tokenizer, DataConfig (system prompt, chat template, length limit)
Gives   lists of token ids, made when they are first needed; raises ConfigError; whether a row has
        gone through the chat template already

`check_prompts` finds invalid rows before a run begins, mostly without encoding them: an upper bound
of the number of tokens follows from a text's size in bytes (`token_bound`).

Prompt text becomes ids only in this module. The engine, the store and the trainer pass the ids on
and never tokenise text again, so they cannot disagree about a template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from laminar.config import ConfigError, DataConfig
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.token_bytes import token_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tools = Sequence[Mapping[str, Any]]

_MARKER = "0d9c1f"
"""A text to find in the output of a template."""
LAZY_TOKENS_MAX = 2**17
"""Maximum tokens of a prompt encoded later, so that with its response it fits a store message."""


@dataclass(frozen=True)
class CheckedPrompts:
    rows: list[PromptRow]
    ids: list[list[int] | None]  #: ids of each row, or None if it is encoded when needed
    left_out: int  #: rows longer than data.max_prompt_length, with data.filter_overlong_prompts


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, row: PromptRow, data: DataConfig, tools: Tools = ()
) -> list[int]:
    """Return the token ids of a prompt, up to the first sampled token; raise ConfigError.

    `tools` has the JSON schemas of an environment's tools, which the chat template writes.
    """
    if has_template(tokenizer, data):
        found = _apply_template(tokenizer, row, data, tools, tokenize=True)
    else:
        found = tokenizer(_own_text(row, data), add_special_tokens=True)["input_ids"]
    ids = [int(i) for i in found]
    if ids[:2] == [tokenizer.bos_token_id] * 2:  # of a text that has it
        ids = ids[1:]
    if not ids:
        raise ConfigError(f"the prompt of row {row.index} has no tokens; drop the row")
    return ids


def check_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    data: DataConfig,
    tools: Tools = (),
) -> CheckedPrompts:
    """Check that every prompt can be encoded within the length limit; raise ConfigError.

    Rows that are too long are left out if the configuration allows it. Prompts whose text is
    provably short enough are not encoded.
    """
    kept: list[PromptRow] = []
    kept_ids: list[list[int] | None] = []
    most, limit = token_bound(tokenizer), min(data.max_prompt_length, LAZY_TOKENS_MAX)
    for row in rows:
        text = _render_text(tokenizer, row, data, tools) if most else ""
        short = most and text and most(text) <= limit
        ids = None if short else encode_prompt(tokenizer, row, data, tools)
        if ids is None or len(ids) <= data.max_prompt_length:
            kept.append(row)
            kept_ids.append(ids)
        elif not data.filter_overlong_prompts:
            raise ConfigError(
                f"the prompt of row {row.index} has {len(ids)} tokens, more than "
                f"data.max_prompt_length = {data.max_prompt_length}; raise the limit or set "
                "data.filter_overlong_prompts = true to leave such rows out"
            )
    if rows and not kept:
        raise ConfigError(
            f"all {len(rows)} prompts are longer than data.max_prompt_length = "
            f"{data.max_prompt_length}; raise the limit"
        )
    return CheckedPrompts(kept, kept_ids, len(rows) - len(kept))


def is_templated(tokenizer: PreTrainedTokenizerBase, row: PromptRow, data: DataConfig) -> bool:
    """Return whether the row's text already has the chat template, which would be applied again.

    Such text contains a special token of the template, or starts and ends with all that the
    template puts around a message, if that is more than white space.
    """
    if not has_template(tokenizer, data):
        return False
    before, after = _find_template_affixes(tokenizer, data)
    marks = [mark for mark in tokenizer.all_special_tokens if mark in before + after]
    messages = [{"content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    texts = [m["content"] for m in messages if isinstance(m.get("content"), str)]
    if any(mark in text for text in texts for mark in marks):
        return True
    wrapped = bool((before + after).strip())
    return wrapped and any(text.startswith(before) and text.endswith(after) for text in texts)


def _find_template_affixes(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> tuple[str, str]:
    """Return the template's text before and after a user's message; empty if it refuses one."""
    return _split_template(tokenizer, data, [{"role": "user", "content": _MARKER}], begin=True)


def _split_template(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    messages: list[dict[str, Any]],
    *,
    begin: bool = False,
) -> tuple[str, str]:
    """Return the template's text before and after _MARKER; empty if it refuses the messages."""
    try:
        whole = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=begin, **data.apply_chat_template_kwargs
        )
    except (TemplateError, TypeError):
        return "", ""
    before, _, after = str(whole).partition(_MARKER)
    return before, after


def warn_turn_end(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, end_ids: Collection[int]
) -> dict[str, str]:
    """Warn if the template ends the model's turn with a special token that ends no response."""
    if not has_template(tokenizer, data):
        return {}
    answer = {"role": "assistant", "content": _MARKER}
    after = _split_template(tokenizer, data, [{"role": "user", "content": "?"}, answer])[1]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids = [i for i in tokenizer(after, add_special_tokens=False)["input_ids"] if i in special]
    if not ids or not end_ids or not set(ids).isdisjoint(end_ids):
        return {}
    turn, *ends = (f"{i} ({tokenizer.convert_ids_to_tokens(i)!r})" for i in (ids[0], *end_ids))
    return {
        "turn-end": f"the chat template ends a turn with the token {turn}, but the model's end "
        f"tokens are {', '.join(ends)}, so responses may run to data.max_response_length: add "
        f"{ids[0]} to eos_token_id in generation_config.json of model.name"
    }


def has_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> bool:
    """Return whether prompts go through the chat template, those that are strings included."""
    return bool(data.apply_chat_template and tokenizer.chat_template)


def _render_text(
    tokenizer: PreTrainedTokenizerBase, row: PromptRow, data: DataConfig, tools: Tools
) -> str:
    """Return the text of a row that is encoded."""
    if not has_template(tokenizer, data):
        return _own_text(row, data)
    return str(_apply_template(tokenizer, row, data, tools, tokenize=False))


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    row: PromptRow,
    data: DataConfig,
    tools: Tools,
    *,
    tokenize: bool,
) -> Any:
    """Apply the chat template to a row; return the text, or its ids with `tokenize`."""
    try:
        return tokenizer.apply_chat_template(
            build_messages(row, data),
            tokenize=tokenize,
            add_generation_prompt=True,
            return_dict=False,
            tools=[dict(tool) for tool in tools] or None,
            **data.apply_chat_template_kwargs,
        )
    except (TemplateError, TypeError) as error:
        raise ConfigError(
            f"the chat template of the model refuses the prompt of row {row.index}: {error}; "
            "change the messages or data.apply_chat_template_kwargs"
        ) from None


def build_messages(row: PromptRow, data: DataConfig) -> list[dict[str, Any]]:
    """Convert the row to messages, with data.system_prompt first unless the row has its own."""
    if isinstance(row.prompt, str):
        messages = [{"role": "user", "content": row.prompt}]
    else:
        messages = row.prompt
    if data.system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": data.system_prompt}, *messages]
    return messages


def _own_text(row: PromptRow, data: DataConfig) -> str:
    """Return the plain prompt when no template is applied."""
    reason = (
        "the tokenizer has no chat template"
        if data.apply_chat_template
        else "data.apply_chat_template = false"
    )
    if not isinstance(row.prompt, str):
        raise ConfigError(
            f"the prompt of row {row.index} is a list of messages, but {reason}; give prompts as "
            "strings, or use a chat template"
        )
    if data.system_prompt or data.apply_chat_template_kwargs:
        raise ConfigError(
            "data.system_prompt and data.apply_chat_template_kwargs have no effect because "
            f"{reason}; remove them, or use a chat template"
        )
    return row.prompt
