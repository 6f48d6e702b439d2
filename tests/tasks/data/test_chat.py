"""From rows to token ids: template or none, system prompt, length limit, every error."""

import string

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from laminar.config import ConfigError, DataConfig
from laminar.tasks.data.chat import check_prompts, encode_prompt, is_templated, warn_turn_end
from laminar.tasks.data.prompts import PromptRow

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def plain_tokenizer():
    """One token per character; encoding with special tokens puts <s> in front."""
    vocab = {c: i for i, c in enumerate(string.ascii_lowercase + ":;! ")}
    vocab["<s>"] = len(vocab)
    core = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


@pytest.fixture
def chat_tokenizer(plain_tokenizer):
    plain_tokenizer.chat_template = TEMPLATE
    yield plain_tokenizer
    plain_tokenizer.chat_template = None


def row(prompt, index=0):
    return PromptRow(index, prompt, None, {}, "test")


def text(tokenizer, prompt, **data):
    ids = encode_prompt(tokenizer, row(prompt), DataConfig(**data))
    assert all(type(i) is int for i in ids)
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_a_string_is_one_user_message(chat_tokenizer):
    assert text(chat_tokenizer, "hi") == "u:hi;a:"


def test_messages_go_through_the_template(chat_tokenizer):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert text(chat_tokenizer, [*messages, {"role": "user", "content": "z"}]) == "u:x;a:y;u:z;a:"


def test_the_system_prompt_goes_in_front_unless_the_row_has_one(chat_tokenizer):
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "own"}
    assert text(chat_tokenizer, "hi", system_prompt="be") == "s:be;u:hi;a:"
    assert text(chat_tokenizer, [user], system_prompt="be") == "s:be;u:x;a:"
    assert text(chat_tokenizer, [system, user], system_prompt="be") == "s:own;u:x;a:"


def test_template_arguments_reach_the_template(chat_tokenizer):
    assert text(chat_tokenizer, "hi", apply_chat_template_kwargs={"shout": True}) == "u:hi;!a:"


def test_without_a_template_the_string_is_encoded_with_special_tokens(chat_tokenizer):
    assert text(chat_tokenizer, "hi", apply_chat_template=False) == "<s>hi"
    chat_tokenizer.chat_template = None
    assert text(chat_tokenizer, "hi") == "<s>hi"


def fails(tokenizer, prompt, *parts, **data):
    with pytest.raises(ConfigError) as caught:
        encode_prompt(tokenizer, row(prompt, 7), DataConfig(**data))
    for part in parts:
        assert part in str(caught.value)


def test_errors(chat_tokenizer):
    messages = [{"role": "user", "content": "x"}]
    fails(
        chat_tokenizer, messages, "row 7", "apply_chat_template = false", apply_chat_template=False
    )
    fails(chat_tokenizer, [{"role": "tool", "content": "x"}], "row 7", "no tools")
    fails(chat_tokenizer, "x", "system_prompt", apply_chat_template=False, system_prompt="be")
    chat_tokenizer.chat_template = None
    fails(chat_tokenizer, messages, "row 7", "no chat template")
    fails(chat_tokenizer, "x", "_kwargs", "no effect", apply_chat_template_kwargs={"shout": True})
    fails(chat_tokenizer, "x", "system_prompt", "no chat template", system_prompt="be")


def test_a_prompt_without_tokens_is_an_error(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[0]['content'] }}"
    fails(chat_tokenizer, "", "row 7", "no tokens")


def test_an_overlong_prompt_is_an_error_that_names_both_fixes(chat_tokenizer):
    rows = [row("a", 3), row("a" * 8, 4)]  # 6 and 13 tokens
    assert check_prompts(chat_tokenizer, rows, DataConfig(max_prompt_length=13)).left_out == 0
    with pytest.raises(ConfigError) as caught:
        check_prompts(chat_tokenizer, rows, DataConfig(max_prompt_length=12))
    for part in ("row 4", "13 tokens", "data.max_prompt_length = 12", "filter_overlong_prompts"):
        assert part in str(caught.value)


def test_overlong_prompts_are_left_out_on_demand(chat_tokenizer):
    rows = [row("a" * n, n) for n in (1, 8, 2, 9)]
    data = DataConfig(max_prompt_length=8, filter_overlong_prompts=True)
    found = check_prompts(chat_tokenizer, rows, data)
    assert [r.index for r in found.rows] == [1, 2]
    assert [len(ids) for ids in found.ids] == [6, 7]
    assert found.left_out == 2
    with pytest.raises(ConfigError, match="all 4 prompts"):
        check_prompts(
            chat_tokenizer, rows, DataConfig(max_prompt_length=5, filter_overlong_prompts=True)
        )


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "marks", "prompt", "expected"),
    [
        (TEMPLATE, [], "hi", False),
        (TEMPLATE, [], "u:hi;a:", True),
        (TEMPLATE, [], [{"role": "user", "content": "u:hi;a:"}], True),
        (TEMPLATE, [], "say u: and a:", False),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", [], "hi", False),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", [], "hi\n", False),
        (CHATML, ["<|im_start|>", "<|im_end|>"], "hi", False),
        (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_start|>user\nhi<|im_end|>\n", True),
        (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_start|>system\nBe short.<|im_end|>", True),
        ("{{ raise_exception('none') }}", [], "hi", False),
    ],
)
def test_a_prompt_that_has_gone_through_the_template(
    chat_tokenizer, template, marks, prompt, expected
):
    """Special tokens of the template in the text, or all that it puts around a message."""
    chat_tokenizer.chat_template = template
    chat_tokenizer.add_special_tokens({"additional_special_tokens": marks})
    assert is_templated(chat_tokenizer, row(prompt), DataConfig()) is expected
    assert not is_templated(chat_tokenizer, row(prompt), DataConfig(apply_chat_template=False))


def test_a_rendered_prompt_has_one_bos(plain_tokenizer):
    plain = DataConfig(apply_chat_template=False)
    for text in ("ab", "<s>ab"):
        assert encode_prompt(plain_tokenizer, row(text), plain) == encode_prompt(
            plain_tokenizer, row("ab"), plain
        )
    bos = plain_tokenizer.bos_token_id
    assert encode_prompt(plain_tokenizer, row("<s>ab"), plain).count(bos) == 1
    assert encode_prompt(plain_tokenizer, row("a<s><s>b"), plain).count(bos) == 3


@pytest.mark.parametrize(
    ("turn", "ends", "named"),
    [
        ("{{ m['content'] }}<|im_end|>\n", "<s>", ["<|im_end|>", "<s>"]),
        ("{{ m['content'] }}<|im_end|>\n", "<|im_end|>", []),
        ("{{ m['content'] }}<s><|im_end|>", "<s>", []),
        ("{{ m['content'] }};", "<s>", []),  # nothing that a model could end with
        ("{{ raise_exception('no') }}", "<s>", []),
    ],
)  # fmt: skip
def test_a_turn_that_ends_with_no_end_token_is_told(chat_tokenizer, turn, ends, named):
    chat_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    chat_tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    ids = [chat_tokenizer.convert_tokens_to_ids(ends)]
    found = warn_turn_end(chat_tokenizer, DataConfig(), ids)
    assert list(found) == ["turn-end"] * bool(named)
    for token in named:
        words = f"{chat_tokenizer.convert_tokens_to_ids(token)} ({token!r})"
        assert words in found["turn-end"] and "generation_config.json" in found["turn-end"]
    assert not warn_turn_end(chat_tokenizer, DataConfig(apply_chat_template=False), ids)
