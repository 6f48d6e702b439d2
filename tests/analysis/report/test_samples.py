"""Reading what a run's model wrote: the right answers, nothing else, and nobody is disturbed."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from laminar.analysis.report.samples import Sample, SampleFilter, find_samples
from laminar.cli.samples import format_sample
from laminar.config import ConfigError, dump_config, load_config
from laminar.launch.preflight import response_sampler
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.tasks.data.decoding import make_decoder, make_response_decoder
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer
from tests.analysis.conftest import Cli

MODEL = Path(__file__).parents[3] / "configs/models/spell-0.6m"
WORDS = {1: "<s>", 7: "yes", 8: "No", 9: "\x1b[2J"}


def decode(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def made_store(run_dir: Path) -> Path:
    """Group 0.0 trained by the first step, 0.1 by the third; an evaluation before and after."""
    run_dir.mkdir(exist_ok=True)
    database = Database(run_dir / "store.sqlite", 1)
    prompt = m.PromptPayload(
        prompt="?", ground_truth="yes", columns={}, data_source="d", prompt_ids=b"\1\0\0\0"
    )
    database.load_prompts([prompt] * 2, [prompt], "digest")
    for group, sibling, tokens, score, reason, detail, end_step in (
        ("0.0", 0, [7, 7], 1.0, "ok", "", 0),
        ("0.0", 1, [8], 0.0, "error", "KeyError: 'x' (reward.py:4)", 0),
        ("0.1", 0, [7, 8, 8], 0.5, "ok", "", 2),
        ("0.1", 1, [8] * 6, -1.0, "ok", "", 2),
        ("e0.0", 0, [8], 0.0, "ok", "", 0),
        ("e1.0", 0, [7], 1.0, "ok", "", 3),
    ):
        fill(database, group, sibling, tokens, score, reason, detail, end_step)
    database.handle_batch([m.Open(items=(open_("0.1", 2, 0),))])
    database.close()
    return run_dir


def fill(database, group, sibling, tokens, score, reason, detail, end_step) -> None:
    who = {"trajectory_id": f"{group}.{sibling}", "placement": 1}
    n, held_out = len(tokens), group.startswith("e")
    data, logprobs = struct.pack(f"<{n}i", *tokens), struct.pack(f"<{n}f", *[-0.5] * n)
    finish = {"finish_reason": "length" if n > 5 else "stop", "num_tokens": n}
    end = m.EndItem(
        **who,
        group_id=group,
        sibling=sibling,
        purpose="eval" if held_out else "train",
        row_index=0 if held_out else int(group[-1]),
        end="evaluated" if held_out else "trained",
        step=end_step,
    )
    extras = {"format": 0.5, "found": "\x1b[1m"} if group == "0.1" else {}
    reward = m.RewardItem(**who, reward=score, reason=reason, detail=detail, extras=extras)
    version = end_step if held_out else max(end_step - 1, 0)
    opened = open_(group, sibling, version)
    chunk = m.AppendItem(
        **who,
        offset=0,
        tokens=data,
        logprobs=logprobs,
        weight_version=opened.weight_version,
        version_step=opened.version_step,
    )
    database.handle_batch(
        [
            m.Open(items=(opened,)),
            m.Append(items=(chunk,)),
            m.Finish(items=(m.FinishItem(**who, **finish),)),
            m.PutRewards(items=(reward,)),
            m.End(items=(end,)),
        ]
    )


def open_(group: str, sibling: int, version: int) -> m.OpenItem:
    return m.OpenItem(
        trajectory_id=f"{group}.{sibling}",
        group_id=group,
        sibling=sibling,
        purpose="eval" if group.startswith("e") else "train",
        row_index=0 if group.startswith("e") else int(group[-1]),
        attempt=1,
        placement=1,
        weight_version=version + 10,
        version_step=version,
        replica="rollout-1",
        temperature=1.0,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_store(tmp_path_factory.mktemp("samples"))


def names(run_dir: Path, choice: SampleFilter) -> list[str]:
    return [sample.row.id for sample in find_samples(run_dir, choice, decode)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (SampleFilter(), ["0.1.1", "0.1.0", "0.0.1", "0.0.0"]),
        (SampleFilter(step=1), ["0.0.1", "0.0.0"]),
        (SampleFilter(step=3), ["0.1.1", "0.1.0"]),
        (SampleFilter(evaluation=0), ["e0.0.0"]),
        (SampleFilter(evaluation=3), ["e1.0.0"]),
        (SampleFilter(worst=2), ["0.1.1", "0.0.1"]),
        (SampleFilter(best=2), ["0.0.0", "0.1.0"]),
        (SampleFilter(step=3, best=1), ["0.1.0"]),
        (SampleFilter(search="no"), ["0.1.1", "0.1.0", "0.0.1"]),
        (SampleFilter(search="no", best=1), ["0.1.0"]),
        (SampleFilter(search="never"), []),
        (SampleFilter(name="0.1"), ["0.1.0", "0.1.1", "0.1.2"]),
        (SampleFilter(name="0.0.1"), ["0.0.1"]),
    ],
)
def test_which_answers_are_chosen(run: Path, choice: SampleFilter, expected: list[str]) -> None:
    """Steps are counted from 1; what is still being generated is shown only by name."""
    assert names(run, choice) == expected


def test_everything_about_one_answer(run: Path) -> None:
    (sample,) = find_samples(run, SampleFilter(name="0.0.1"), decode)
    assert sample.to_dict() == {
        "id": "0.0.1", "group": "0.0", "purpose": "train", "step": 1, "evaluation": None,
        "prompt": "<s>", "response": "No", "answer": "yes", "reward": 0.0, "reason": "error",
        "exception": "KeyError: 'x' (reward.py:4)", "extras": {}, "length": 1, "truncated": False,
        "truncated_by": None, "version": 10, "version_step": 0, "replica": "rollout-1",
        "spans": [
            {"replica": "rollout-1", "weight_version": 10, "version_step": 0, "num_tokens": 1}
        ],
        "status": "trained",
    }  # fmt: skip
    (cut,) = find_samples(run, SampleFilter(step=3, worst=1), decode)
    assert (cut.truncated, cut.step, cut.row.version_step) == (True, 3, 1)
    ended = cut._replace(row=cut.row._replace(finish_reason="max-turns"))
    assert ended.to_dict()["truncated"] and ended.to_dict()["truncated_by"] == "max-turns"
    assert "truncated (max-turns)" in "\n".join(format_sample(ended))
    assert not cut._replace(row=cut.row._replace(finish_reason=None)).truncated
    assert cut.extras == {"format": 0.5, "found": "\x1b[1m"}
    assert "  format 0.5, found \\x1b[1m" in list(format_sample(cut))
    (held_out,) = find_samples(run, SampleFilter(evaluation=3), decode)
    assert (held_out.step, held_out.evaluation, held_out.reward) == (None, 3, 1.0)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (SampleFilter(step=2), r"--step 2: this step trained no responses; there are steps 1, 3"),
        (SampleFilter(evaluation=1), r"--eval 1: .*; there are those after steps 0, 3"),
        (SampleFilter(name="7.7"), r"no trajectory or group '7.7'"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    run: Path, choice: SampleFilter, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        names(run, choice)


def test_a_run_at_work_is_not_held_up(tmp_path: Path) -> None:
    """Between two samples no read transaction is open: the store can begin its log anew."""
    run_dir = made_store(tmp_path)
    with sqlite3.connect(run_dir / "store.sqlite", isolation_level=None) as store:
        found = find_samples(run_dir, SampleFilter(), decode)
        before = next(found)
        store.execute("UPDATE trajectories SET reward_detail = 'later'")
        ((busy, *_),) = store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert not busy
        assert len([before, *found]) == 4


def test_what_was_written_cannot_steer_the_terminal(run: Path) -> None:
    (sample,) = find_samples(run, SampleFilter(name="0.0.1"), decode)
    told = "\n".join(format_sample(Sample(sample.row, "two\nlines", decode([9]), "yes", {}, ())))
    assert "\x1b" not in told and "| \\x1b[2J" in told and "| two\n    | lines" in told
    assert "reward FAILED: error, KeyError: 'x' (reward.py:4)" in told


def test_jsonl_for_tools_and_one_sentence_for_a_mistake(tmp_path: Path, cli: Cli) -> None:
    run_dir = made_store(tmp_path)
    settings = [f"model.name={MODEL}", "data.dataset=gcd"]
    (run_dir / "config.toml").write_text(dump_config(load_config([], settings)))
    code, out = cli("samples", run_dir, "--jsonl")
    assert code == 0
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [-1.0, 0.5, 0.0, 1.0]
    code, out = cli("samples", run_dir, "-n", "1")
    assert code == 0 and out.startswith("0.1.1  trained by step 3\n  reward -1\n")
    assert "\n  6 tokens, truncated (length), by version 11 (made by 1 steps) on rollout-1\n" in out
    code, out = cli("samples", run_dir, "--step", "9")
    assert code == 2 and out.endswith("there are steps 1, 3")
    (run_dir / "store.sqlite").unlink()
    code, out = cli("samples", run_dir)
    assert code == 2 and "its store has started" in out


def test_rewards_read_what_samples_show_but_the_end_token(tmp_path: Path) -> None:
    """Also where `<answer>` is a special token; the trial passes its forms through the same."""
    model = Path(shutil.copytree(MODEL, tmp_path / "m"))
    content = json.loads((model / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = True
    (model / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(model))
    ends = end_ids(str(model), tokenizer)
    read = make_response_decoder(tokenizer, ends)
    config = load_config([], [f"model.name={model}", "data.dataset=gcd"])
    shown = make_decoder(tmp_path, config)
    ids = tokenizer("<answer>ab</answer>", add_special_tokens=False)["input_ids"]
    (end,) = ends
    for response in (ids, [*ids, end], [99_999, *ids, 256]):
        assert read(response) == shown(response).removesuffix(tokenizer.decode([end]))
    assert read([*ids, end]) == "<answer>ab</answer>" and read([]) == read([end]) == ""
    sample = response_sampler(tokenizer, ends)
    assert sample("<answer>4</answer>")[0] == "<answer>4</answer>"


def test_special_tokens_and_ids_without_a_token_are_shown(tmp_path: Path) -> None:
    """The model may be named from another directory: what the run has written has its tokenizer."""
    (tmp_path / "export").symlink_to(MODEL)
    config = load_config([], ["model.name=elsewhere/models/m", "data.dataset=gcd"])
    text = make_decoder(tmp_path, config)
    ids = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert text([ids["a"], 99_999, ids["b"]]) == "a<id 99999>b"
    assert text([ids["a"], 257]) == "a<eos>"
