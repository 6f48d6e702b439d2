"""A user's own prompts and reward file, with a config of a few lines."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from pathlib import Path

import msgspec
import pytest

from tests.run.conftest import ROOT, Finished, train

pytestmark = [pytest.mark.process, pytest.mark.long]

REWARD = '''print("loaded")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Letters of the word that are in the answer; fails on words with a q."""
    if "q" in ground_truth:
        raise ValueError("no words with a q")
    return {"score": len(set(solution_str) & set(ground_truth)) / len(set(ground_truth))}
'''

CONFIG = """
run.name = "run"
model.name = "{model}"
data.train_files = ["{data}"]
data.max_prompt_length = 96
data.max_response_length = 48
data.train_batch_size = 8
data.val_size = 16
rollout.group_size = 4
rollout.max_num_seqs = 32
reward.custom_reward_function.path = "{reward}"
optim.lr = 1e-4
trainer.total_training_steps = 6
"""


def test_own_prompts_and_reward(tmp_path: Path) -> None:
    words = ["apple", "banana", "cherry", "quince", "grape", "lemon", "mango", "olive", "peach"]
    rows = [
        {"prompt": f"Spell this word backward (example: sun -> nus): {w}{i}", "answer": w}
        for i in range(20)
        for w in words
    ]
    data, reward, config = tmp_path / "d.jsonl", tmp_path / "r.py", tmp_path / "c.toml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    model = ROOT / "configs" / "models" / "spell-0.6m"
    text = CONFIG.format(model=model, data=data, reward=reward)
    assert len(text.strip().splitlines()) <= 15
    config.write_text(text)
    run = train(tmp_path / "runs", config=str(config))
    assert run.code == 0, run.output
    assert run.summary["weight_versions"] >= 5
    _every_stored_reward_is_a_direct_call(run.directory, reward)
    _failures_are_told(run)


def _failures_are_told(run: Finished) -> None:
    """Where the user looks: the terminal, before and while it runs and at its end; the figures."""
    first = "ValueError: no words with a q (r.py:5)"
    assert "': 1\n" in run.output and "'': 0\n" in run.output
    assert run.output.count(f"the reward FAILED on a response: {first}") == 1
    assert "\nreward FAILED    on " in run.output and f"the first time   {first}" in run.output
    failed = run.summary["reward_errors"]
    assert list(failed) == ["error"] and failed["error"] < run.summary["reward_answers"] / 2
    assert run.summary["reward_error_first"] == first
    steps = [line for line in run.metrics() if "reward/errors/total" in line]
    assert 0 < steps[-1]["reward/errors/error"] <= failed["error"]
    for name in ("rollout-0", "rollout-1"):
        assert "loaded\n" in (run.directory / f"logs/latest/{name}.reward.log").read_text()
    assert "loaded\n" not in run.output


def _every_stored_reward_is_a_direct_call(directory: Path, reward: Path) -> None:
    spec = importlib.util.spec_from_file_location("user_reward", reward)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    database = sqlite3.connect(directory / "store.sqlite")
    stored = database.execute(
        "SELECT p.payload, t.text, t.reward, t.reward_reason FROM trajectories t JOIN prompts p"
        " ON p.purpose = t.purpose AND p.row_index = t.row_index WHERE t.status = 'rewarded'"
    ).fetchall()
    database.close()
    assert len(stored) >= 6 * 8 * 4
    failed = 0
    for payload, text, score, reason in stored:
        prompt = msgspec.msgpack.decode(payload)
        try:
            direct = module.compute_score("d", text, prompt["ground_truth"])["score"]
            assert reason == "ok"
        except ValueError:
            direct, failed = 0.0, failed + 1
            assert reason == "error"
        assert score == direct
    assert failed > 0
