"""The model directory that the quickstart starts from, as it is shipped."""

import importlib.util
import json
import struct
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs" / "models" / "spell-0.6m"
QUESTION = "Spell this word backward (example: sun -> nus): stream"
TEXTS = [
    "",
    "plain words",
    "two\nlines\r\n\ttab \x00 end ",
    "caf\u00e9 \u65e5\u672c\u8a9e \u0434\u0430 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f642 \U0001f469\u200d\U0001f680 \ufffd",
    " it's  a <answer> b</answer>, c .",
    "<answer></answer><pad><eos>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_base_model", ROOT / "tools" / "make_base_model.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_json(name: str) -> dict:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def test_directory_is_small() -> None:
    assert sum(f.stat().st_size for f in MODEL.rglob("*") if f.is_file()) <= 5 * 2**20


def test_tied_head_is_stored_once_and_everything_is_float32() -> None:
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    assert "model.embed_tokens.weight" in header and "lm_head.weight" not in header
    assert {entry["dtype"] for entry in header.values()} == {"F32"}


def test_model_shape(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer) == 260
    assert model.config.max_position_embeddings == 2048
    assert 500_000 < model.num_parameters() < 1_000_000


def test_end_and_pad_ids_agree(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    assert tokenizer.bos_token_id is None and model.config.bos_token_id is None
    for settings in (read_json("config.json"), read_json("generation_config.json")):
        assert settings["eos_token_id"] == tokenizer.eos_token_id
        assert settings["pad_token_id"] == tokenizer.pad_token_id


def test_generation_config_changes_no_distribution() -> None:
    known = {"eos_token_id", "pad_token_id", "transformers_version"}
    assert set(read_json("generation_config.json")) <= known


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trip(tokenizer: Qwen2Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer)
    assert Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids == ids


def test_decomposed_text_is_composed(tokenizer: Qwen2Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_byte_ids(tokenizer: Qwen2Tokenizer) -> None:
    text = "Ab \u00e9\n"
    assert tokenizer.encode(text) == list(text.encode())


def test_answer_tags_are_single_tokens_and_survive(tokenizer: Qwen2Tokenizer) -> None:
    ids = tokenizer.encode("x<answer>ab</answer><eos>")
    assert ids == [120, 258, 97, 98, 259, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<answer>ab</answer>"


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_template_is_the_question_and_a_newline(
    tokenizer: Qwen2Tokenizer, add_generation_prompt: bool
) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )
    assert ids == list(f"{QUESTION}\n".encode())


def test_chat_template_ends_an_answer(tokenizer: Qwen2Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "reply"},
        {"role": "user", "content": "again"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "ask\nreply<eos>\nagain\n"


def test_model_answers_a_short_word(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    question = "Spell this word backward (example: sun -> nus): cat"
    prompt = tokenizer(question + "\n", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0]
    reply = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert reply.endswith("<answer>tac</answer>")


def test_tokenizer_files_are_what_the_tool_writes(tool: ModuleType, tmp_path: Path) -> None:
    tool.build_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (MODEL / name).read_bytes()


def test_held_out_is_by_digest_and_not_by_order(tool: ModuleType) -> None:
    questions = [f"question {i}" for i in range(50)]
    kept = tool.held_out(questions, 10)
    assert len(kept) == 10
    assert kept == tool.held_out([*reversed(questions), *questions], 10)
    assert kept > tool.held_out(questions, 5)
