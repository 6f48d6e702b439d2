"""A tokenizer with merges and a chat template with tools, for tests of the tokens after a turn."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

START, END = "<s>", "</s>"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer whose merges depend on adjacent pieces."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[START, END],
        show_progress=False,
    )
    corpus = [f'{a}+{a * 7} = {a * 8}\n\n{{"a": {a}, "b": {a * 3}}} tool\n' for a in range(400)]
    core.train_from_iterator(corpus, trainer)
    core.add_tokens([AddedToken(tag) for tag in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, chat_template=template)


def schema(name: str, **types: str) -> dict[str, object]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
