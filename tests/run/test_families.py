"""Other model families, and the switches that the quickstart leaves alone, in whole runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from laminar.analysis.facts.trained_steps import read_trained_steps
from tests.run.conftest import ROOT, Finished, check_books, train

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "eos_token_id": 257,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

TRL_REWARD = '''
def spread(prompts, completions, completion_ids, answer, **columns):
    """Relative to the longest sibling: it makes sense only for a whole group at once."""
    assert len(prompts) == len(completions) == len(answer) == 4
    texts = [c[0]["content"] for c in completions]
    longest = max(map(len, texts)) or 1
    return [len(set(t) & set(a)) + len(t) / longest for t, a in zip(texts, answer)]
'''

LOSS = """
def reinforce(batch):
    return -batch.advantages * batch.log_probs


def leave_one_out(batch):
    n = batch.group_sizes
    return (batch.rewards - batch.group_means(batch.rewards)) * n / (n - 1).clip(1)
"""

STRATEGY = '''
def choose(candidates, count):
    """Long groups first, among those that are due."""
    order = sorted(candidates, key=lambda c: (c["deadline"], -c["num_tokens"]))
    return [c["group"] for c in order][:count]
'''


def build(kind: str, directory: Path) -> Path:
    """A tiny random model with the quickstart's tokenizer."""
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE))
        if kind == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True))
    )
    model.save_pretrained(directory / kind)
    tokenizer = ROOT / "configs" / "models" / "spell-0.6m"
    for file in [*tokenizer.glob("tokenizer*"), *tokenizer.glob("chat_template*")]:
        shutil.copy(file, directory / kind)
    return directory / kind


def verl_rows(directory: Path) -> Path:
    """A parquet file in verl's layout: messages, and the answer inside reward_model."""
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"Say {word} {i}"}],
            "reward_model": {"style": "rule", "ground_truth": word},
            "answer": word,
            "extra_info": {"index": i},
        }
        for i in range(30)
        for word in ("apple", "pear", "fig")
    ]
    path = directory / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def run(tmp_path: Path, kind: str, *switches: str) -> Finished:
    finished = train(
        tmp_path / "runs",
        "data.dataset=",
        f"data.train_files={verl_rows(tmp_path)}",
        f"model.name={build(kind, tmp_path)}",
        "data.val_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "data.train_batch_size=8",
        "rollout.group_size=4",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        *switches,
    )
    assert finished.code == 0, finished.output
    check_books(finished)
    return finished


@pytest.mark.long
def test_llama_with_group_rewards_a_strategy_kl_and_two_mini_batches(tmp_path: Path) -> None:
    reward, strategy = tmp_path / "reward.py", tmp_path / "strategy.py"
    reward.write_text(TRL_REWARD)
    strategy.write_text(STRATEGY)
    finished = run(
        tmp_path,
        "llama",
        f"reward.custom_reward_function.path={reward}",
        f"algorithm.batch_strategy={strategy}:choose",
        "algorithm.use_kl_loss=true",
        "algorithm.policy_loss.loss_mode=gspo",
        "algorithm.ppo_mini_batch_size=4",
    )
    steps = [line for line in finished.metrics() if "actor/kl_loss" in line]
    assert len(steps) == 4
    assert steps[-1]["actor/kl_loss"] > 0
    assert all(line["reward/mean"] > 0 for line in steps)
    # The function takes whole groups: it fails on each held-out answer, which has no siblings.
    held_out = 8 * len(finished.summary["evaluations"])
    assert finished.summary["reward_errors"] == {"error": held_out}


@pytest.mark.long
def test_qwen3_with_exact_answers_priority_and_a_loss_of_the_user(tmp_path: Path) -> None:
    loss = tmp_path / "my.py"
    loss.write_text(LOSS)
    finished = run(
        tmp_path,
        "qwen3",
        "reward.kind=exact",
        "algorithm.batch_strategy=priority",
        f"algorithm.policy_loss.loss_mode={loss}:reinforce",
        f"algorithm.adv_estimator={loss}:leave_one_out",
    )
    functions = read_trained_steps(finished.directory).functions
    assert set(functions) == {"algorithm.policy_loss.loss_mode", "algorithm.adv_estimator"}
    assert len(set(functions.values())) == 1, "of one file"
