"""Prompt rows: sources, the held-out split, values that survive the wire, every error."""

import json
import os
import random

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import xxhash

from laminar.config import ConfigError, DataConfig
from laminar.storage import messages as m
from laminar.tasks.data.prompts import PromptRow, from_plain, load_prompts, prompt_digest, to_plain


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(*files, **settings):
    return load_prompts(DataConfig(train_files=list(files), **{"val_size": 0, **settings}))


def fails(*parts, **settings):
    """The ConfigError's text, which must be one line and hold every part."""
    with pytest.raises(ConfigError) as caught:
        load_prompts(DataConfig(**{"val_size": 0, **settings}))
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
    return text


# --- reasoning-gym


def test_a_dataset_gives_its_items_in_order():
    data = DataConfig(dataset="chain_sum", dataset_size=5, val_size=0, dataset_seed=7)
    found = load_prompts(data)
    assert [row.index for row in found.train] == [0, 1, 2, 3, 4]
    row = found.train[3]
    assert row.prompt == row.columns["question"]
    assert row.ground_truth == row.columns["answer"]
    assert row.columns["metadata"]["source_index"] == 3
    assert row.data_source == "chain_sum"
    assert load_prompts(data) == found
    other = load_prompts(DataConfig(dataset="chain_sum", dataset_size=5, val_size=0))
    assert other.digest != found.digest


def test_dataset_settings_reach_the_dataset():
    data = DataConfig(
        dataset="spell_backward",
        dataset_config={"min_word_len": 5, "max_word_len": 5},
        dataset_size=20,
        val_size=0,
    )
    assert {len(row.ground_truth) for row in load_prompts(data).train} == {5}
    plotting = DataConfig(dataset="game_of_life", dataset_size=2, val_size=0)
    assert len(load_prompts(plotting).train) == 2


def test_a_composite_dataset_names_the_source_of_each_item():
    parts = [{"name": n, "weight": 1.0, "config": {}} for n in ("chain_sum", "letter_counting")]
    data = DataConfig(
        dataset="composite", dataset_config={"datasets": parts}, dataset_size=12, val_size=0
    )
    sources = {row.data_source for row in load_prompts(data).train}
    assert sources == {"chain_sum", "letter_counting"}


def test_repeated_items_stay_in_training():
    data = DataConfig(
        dataset="letter_counting",
        dataset_config={"min_words": 1, "max_words": 1},
        dataset_size=300,
        val_size=10,
    )
    found = load_prompts(data)
    prompts = [row.prompt for row in found.train]
    assert len(set(prompts)) < len(prompts)


def test_dataset_errors():
    fails("'spell_backwards'", "spell_backward", dataset="spell_backwards")
    fails("'words'", "min_word_len", dataset="spell_backward", dataset_config={"words": 1})
    fails("data.dataset_seed", dataset="spell_backward", dataset_config={"seed": 1})
    fails("data.dataset_size", dataset="spell_backward", dataset_config={"size": 1})
    fails("min_numbers must be", dataset="countdown", dataset_config={"min_numbers": -2})
    fails("refused", dataset="countdown", dataset_config={"min_numbers": "many"})
    fails("composite", "at least one", dataset="composite")


# --- files


def test_jsonl_rows_keep_all_columns(tmp_path):
    rows = [
        {"prompt": "1+1", "answer": "2", "level": 3, "tags": ["a"]},
        {"prompt": "2+2", "answer": "4", "data_source": "sums"},
    ]
    found = load(jsonl(tmp_path / "easy.jsonl", rows)).train
    assert found[0] == PromptRow(0, "1+1", "2", {"answer": "2", "level": 3, "tags": ["a"]}, "easy")
    assert found[1].data_source == "sums"
    assert found[1].index == 1


def test_rows_are_numbered_over_all_files(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    b = jsonl(tmp_path / "b.jsonl", [{"prompt": "c"}])
    assert [(r.index, r.prompt, r.data_source) for r in load(a, b).train] == [
        (0, "a", "a"),
        (1, "b", "a"),
        (2, "c", "b"),
    ]


def test_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n\n')
    assert len(load(str(path)).train) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "42", "label": "no"},
        {"label": "42", "ground_truth": "no"},
        {"answer": None, "ground_truth": "42"},
        {"reward_model": {"style": "rule", "ground_truth": "42"}},
    ],
)
def test_the_answer_is_found_under_the_usual_names(tmp_path, row):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "q", **row}])
    assert load(path).train[0].ground_truth == "42"


def test_answer_key_decides_and_may_be_a_path(tmp_path):
    row = {"prompt": "q", "answer": "no", "solution": "yes", "meta": {"gold": "deep"}}
    path = jsonl(tmp_path / "a.jsonl", [row])
    assert load(path, answer_key="solution").train[0].ground_truth == "yes"
    assert load(path, answer_key="meta.gold").train[0].ground_truth == "deep"
    assert load(jsonl(tmp_path / "b.jsonl", [{"prompt": "q"}])).train[0].ground_truth is None


def test_a_verl_parquet_row(tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(3)
    ]
    found = load(parquet(tmp_path / "train.parquet", rows)).train
    assert found[2].prompt == [{"role": "user", "content": "question 2"}]
    assert found[2].ground_truth == "2"
    assert found[2].data_source == "openai/gsm8k"
    assert found[2].columns["extra_info"] == {"split": "train", "index": 2}
    assert "prompt" not in found[2].columns


def test_null_fields_that_parquet_adds_to_messages_go(tmp_path):
    rows = [
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a", "n": "x"}]}
    ]
    found = load(parquet(tmp_path / "t.parquet", rows)).train[0].prompt
    assert found == [{"role": "system", "content": "s"}, {"role": "user", "content": "a", "n": "x"}]


def test_null_fields_that_parquet_adds_below_go_and_those_of_json_stay(tmp_path):
    def messages(**arguments):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "user", "content": "a"},
        ]

    rows = [
        {"prompt": messages(city="x"), "c": {"a": 1}},
        {"prompt": messages(zip=1), "c": {"b": 1}},
    ]
    first, second = load(parquet(tmp_path / "t.parquet", rows)).train
    assert [first.prompt, second.prompt] == [row["prompt"] for row in rows]
    assert first.columns == {"c": {"a": 1, "b": None}}  # as other readers give them
    (row,) = load(jsonl(tmp_path / "t.jsonl", [{"prompt": messages(city=None)}])).train
    assert row.prompt == messages(city=None)


def test_content_as_a_list_of_text_parts_is_joined(tmp_path):
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    rows = [{"prompt": [{"role": "user", "content": parts}]}]
    for path in (jsonl(tmp_path / "a.jsonl", rows), parquet(tmp_path / "a.parquet", rows)):
        assert load(path).train[0].prompt == [{"role": "user", "content": "a b"}]
    parts[1] = {"type": "image", "image": "a.png"}
    fails("part of type 'image'", "text", train_files=[jsonl(tmp_path / "b.jsonl", rows)])


def test_file_errors(tmp_path):
    def put(name, text):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return {"train_files": [str(tmp_path / name)]}

    fails("gone.jsonl", "does not exist", train_files=[str(tmp_path / "gone.jsonl")])
    os.mkfifo(tmp_path / "pipe.jsonl")
    fails("pipe.jsonl", "is a pipe or device", train_files=[str(tmp_path / "pipe.jsonl")])
    fails("a.csv", ".jsonl or .parquet", **put("a.csv", "prompt\n"))
    fails("empty.jsonl", "no rows", **put("empty.jsonl", ""))
    fails("blank.jsonl", "no rows", **put("blank.jsonl", "\n\n"))
    fails("line 2", "not valid JSON", **put("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n'))
    fails("line 1", "not valid JSON", **put("latin.jsonl", b'{"prompt": "\xe9"}\n'))
    fails("line 2", "list", "object", **put("list.jsonl", '{"prompt": "a"}\n[1]\n'))
    fails(
        "line 2", "'prompt'", "question, answer", "data.prompt_key",
        **put("cols.jsonl", '{"prompt": "a"}\n{"question": "a", "answer": 1}\n'),
    )  # fmt: skip
    for value in ("5", "null", "[]", '[{"role": "user"}]', '{"role": "user", "content": "a"}'):
        fails("line 1", "wrong type", **put("type.jsonl", f'{{"prompt": {value}}}\n'))
    for levels in (490, 5000):
        text = '{"prompt": "a", "b": %s%s}' % ("[" * levels, "]" * levels)  # noqa: UP031
        fails("line 1", "deep" if levels < 1000 else "recursion", **put("deep.jsonl", text))
    fails("line 1", "'gold'", answer_key="gold", **put("key.jsonl", '{"prompt": "a"}\n'))
    fails("bad.parquet", "not a readable parquet", **put("bad.parquet", "nonsense"))


def test_half_a_surrogate_pair_is_replaced_wherever_it_stands(tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_text(
        r'{"prompt": "\ud800 a", "b": ["\udc00"], "c\ud800": {"\ud800": "\ud83d\ude00"}}'
    )
    (row,) = load(str(path)).train
    assert (row.prompt, row.columns) == ("\ufffd a", {"b": ["\ufffd"], "c\ufffd": {"\ufffd": "😀"}})


def test_parquet_errors(tmp_path):
    schema = pyarrow.schema([("prompt", pyarrow.string())])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "none.parquet")
    fails("no rows", train_files=[str(tmp_path / "none.parquet")])
    rows = [{"prompt": "a", "image": b"\x00"}]
    path = parquet(tmp_path / "image.parquet", rows)
    fails("row 0", "'image'", "bytes", train_files=[path])


# --- the split


def test_the_held_out_prompts_have_the_smallest_digests_in_any_order(tmp_path):
    prompts = [f"prompt {i}" for i in range(50)]
    expected = sorted(prompts, key=lambda p: xxhash.xxh3_64(p.encode()).hexdigest())[:8]
    for seed in range(3):
        random.Random(seed).shuffle(prompts)
        path = jsonl(tmp_path / "a.jsonl", [{"prompt": p} for p in prompts])
        found = load(path, val_size=8)
        assert [row.prompt for row in found.held_out] == expected
        assert len(found.train) == 42
        assert found.overlap == 0


def test_training_keeps_no_row_with_a_held_out_prompt(tmp_path):
    prompts = [f"prompt {i % 10}" for i in range(35)]  # 0 to 4 four times, 5 to 9 three times
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": p, "n": i} for i, p in enumerate(prompts)])
    found = load(path, val_size=4)
    held = {row.prompt for row in found.held_out}
    assert len(held) == len(found.held_out) == 4
    assert all(row.index < 10 for row in found.held_out)  # the first of several rows
    assert not held & {row.prompt for row in found.train}
    expected = [p for p in prompts if p not in held]
    assert [row.prompt for row in found.train] == expected
    assert found.overlap == 35 - len(expected) - 4


def test_val_files_are_taken_whole_and_win_over_training(tmp_path):
    message = [{"role": "user", "content": "b"}]
    swapped = [{"content": "b", "role": "user"}]
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": p} for p in ("a", message, "c", "c", "d")])
    val = jsonl(tmp_path / "v.jsonl", [{"prompt": p} for p in (swapped, "c", "z")])
    found = load(train, val_files=[val], val_size=1)
    assert [row.prompt for row in found.held_out] == [swapped, "c", "z"]
    assert [(row.index, row.prompt) for row in found.train] == [(0, "a"), (4, "d")]
    assert found.overlap == 3


def test_no_evaluation_keeps_all(tmp_path):
    found = load(jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "a"}]))
    assert (len(found.train), found.held_out, found.overlap) == (2, [], 0)


def test_nothing_left_to_train_on(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    fails("no training prompt", "data.val_size = 2", train_files=[path], val_size=2)
    fails("no training prompt", "data.val_size", train_files=[path], val_files=[path])


def test_with_an_environment_a_row_is_its_prompt_and_its_columns(tmp_path):
    games = [{"prompt": "Reach the number.", "goal": i % 6} for i in range(12)]
    path = jsonl(tmp_path / "a.jsonl", games)
    data = DataConfig(train_files=[path], val_size=2)
    found = load_prompts(data, with_columns=True)
    held = [row.columns["goal"] for row in found.held_out]
    assert len(set(held)) == 2
    goals = [row.columns["goal"] for row in found.train]
    assert goals == [i % 6 for i in range(12) if i % 6 not in held] and found.overlap == 2
    val = jsonl(tmp_path / "v.jsonl", games[:1])
    found = load_prompts(DataConfig(train_files=[path], val_files=[val]), with_columns=True)
    assert (len(found.train), found.overlap) == (10, 2)
    fails("no training prompt", train_files=[path], val_size=2)


def test_distinct_prompts_are_split_alike_with_and_without_columns(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "n": i} for i in range(20)])
    data = DataConfig(train_files=[path], val_size=5)
    found = load_prompts(data, with_columns=True)
    assert found == load_prompts(data)


def test_the_digest_covers_every_field_and_the_split(tmp_path):
    base = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    other = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "3"}]
    one = load(jsonl(tmp_path / "a.jsonl", base))
    assert one.digest == load(jsonl(tmp_path / "a.jsonl", base)).digest
    assert one.digest != load(jsonl(tmp_path / "a.jsonl", other)).digest
    assert one.digest != load(jsonl(tmp_path / "a.jsonl", base), val_size=1).digest


def test_a_message_list_is_digested_as_canonical_json():
    messages = [{"role": "user", "content": "grüß"}]
    text = '[{"content":"grüß","role":"user"}]'
    assert prompt_digest(messages) == xxhash.xxh3_64(text.encode()).hexdigest()


# --- values on the wire


@pytest.mark.parametrize(
    "value",
    [
        (1, ("a", [2, (3,)])),
        {1: "a", (2, 3): {"b": None}},
        2**80,
        -(2**63) - 1,
        {"!tuple": [1], "x": {"!int": "5"}},
        {"!pairs": []},
        [True, 1.5, None, "text", 2**63 - 1],
    ],
)
def test_every_value_comes_back_from_json_and_messagepack(value):
    marked = to_plain(value)
    for carried in (
        json.loads(json.dumps(marked)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(marked)),
    ):
        back = from_plain(carried)
        assert back == value
        assert repr(back) == repr(value)  # 1 is not 1.0 or True, a tuple is not a list


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="set"):
        to_plain({"a": [{1, 2}]})


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_row_too_large_for_the_store_is_refused_with_its_place(tmp_path, write):
    """As verl's code tests may be: the answer is stored in its column and by itself."""
    small, tests = {"prompt": "q", "reward_model": {"ground_truth": "t"}}, "t" * 1_200_000
    rows = [small, {**small, "reward_model": {"ground_truth": tests}}]
    path = write(tmp_path / f"code.{write.__name__}", rows)
    place = f"{path} line 2 " if write is jsonl else f"{path} row 1 "
    sizes = ("takes 24000", str(m.PROMPT_LIMIT), "'reward_model', has 12000", "with 1200005")
    fails(place, *sizes, "drop the row", train_files=[path])
    rows[1]["reward_model"]["ground_truth"] = tests[:1_000_000]
    assert len(load(write(tmp_path / f"less.{write.__name__}", rows)).train) == 2
