"""A text has no more tokens than its bound; nothing is said of tokenizers that are not known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from laminar.config import DataConfig
from laminar.tasks.data.chat import check_prompts
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.token_bytes import token_bound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CUT = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}"), "isolated")


def byte_level(cuts=(), prefix=False, alphabet=ALPHABET):
    core = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "th"])}, [("t", "h")]))
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    core.normalizer = normalizers.NFC()
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return core


def bound(core):
    return token_bound(PreTrainedTokenizerFast(tokenizer_object=core))


KNOWN = byte_level([pre_tokenizers.Digits(individual_digits=True), CUT])


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(st.sampled_from("th\u0958\u0344\ufb2c\U0001d160<s>e\u0301 ")))
def test_no_text_has_more_tokens_than_its_bound(text):
    """Among them characters that NFC makes longer: U+0958, U+FB2C, U+1D160 to three of them."""
    tokens = len(KNOWN.encode(text).ids)
    assert (2 if text else 1) <= tokens <= bound(KNOWN)(text)


def test_ascii_text_is_bounded_by_its_length_and_the_special_tokens():
    assert bound(KNOWN)("abc") == 3 + 1
    assert bound(KNOWN)("ab\u00e9") == 3 * 4 + 1


def with_(change):
    core = byte_level()
    change(core)
    return core


@pytest.mark.parametrize(
    "core",
    [
        byte_level(prefix=True),
        byte_level(alphabet=ALPHABET[1:]),
        byte_level([pre_tokenizers.Split(" ", "removed")]),
        byte_level([pre_tokenizers.Metaspace()]),
        with_(lambda core: setattr(core, "normalizer", normalizers.NFKC())),
        with_(lambda core: setattr(core, "normalizer", normalizers.Sequence([]))),
        with_(lambda core: setattr(core, "pre_tokenizer", CUT)),
        with_(lambda core: setattr(core, "model", models.WordLevel({"a": 0}, unk_token="a"))),
        with_(lambda core: core.enable_padding()),
    ],
)
def test_nothing_is_said_of_others(core):
    assert bound(core) is None


def test_only_rows_that_could_be_too_long_are_encoded():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    rows = [PromptRow(n, text, None, {}, "d") for n, text in enumerate(("ab", "abcd", "the thth"))]
    data = DataConfig(max_prompt_length=6, apply_chat_template=False)
    found = check_prompts(tokenizer, rows, data)
    assert [ids is None for ids in found.ids] == [True, True, False]
    assert len(found.ids[2]) == 6 and found.left_out == 0
