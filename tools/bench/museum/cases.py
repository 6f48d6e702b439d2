"""The twelve cases: a fault that others reported, and how it comes about in a run of Laminar.

Reads   the recipes and models in configs/
Writes  the files of a case, below its directory: data, rewards, environments, a model
Gives   CASES; Case
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from laminar.cli.init import REWARD

WORDS, CALCULATOR = "configs/recipes/words/run.toml", "configs/recipes/calculator/run.toml"
STEPS = 14  #: of a case whose fault is not named sooner
SMALL = [
    "data.train_batch_size=8", "data.dataset_size=800", "data.val_size=0", "trainer.test_freq=0",
    "trainer.val_before_train=false", "trainer.save_freq=1", "trainer.logger=[]",
    f"trainer.total_training_steps={STEPS}",
]  # fmt: skip
KL = ["algorithm.use_kl_loss=true", "optim.lr=5e-4"]
FEW = ["data.train_batch_size=4", "data.val_size=16", "trainer.logger=[]"]
CLEAN = (
    (WORDS, [*FEW, "trainer.total_training_steps=60"]),
    (CALCULATOR, [*FEW, "trainer.total_training_steps=60"]),
    (WORDS, [*FEW, *KL, "lora.rank=8", "trainer.total_training_steps=40"]),
    (WORDS, [*FEW, *KL, "optim.lr_scheduler_type=cosine", "trainer.total_training_steps=40"]),
)
"""Configurations and settings of runs without a fault."""


class Case(NamedTuple):
    """A fault, and how Laminar names it."""

    name: str  #: that of the product's fault (faults.py), if it has one
    report: str  #: thread in public
    planted: str
    named: str  #: kind of the warning; of a refusal, words of it
    settings: Sequence[str] = ()
    config: str = WORDS
    write_files: Callable[[Path], list[str]] = lambda directory: []  #: gives settings
    #: what happens while the run is stopped, after some steps; gives settings of the resume
    change: Callable[[Path], list[str]] | None = None


def _fuse_experts(directory: Path) -> list[str]:
    """Write a mixture of experts whose files have one tensor for all experts of a layer.

    Only vLLM runs it. Where it is missing, an empty module will do: the files are checked first.
    """
    from transformers import AutoModelForCausalLM  # seconds to import; so are the models

    from tools.kit.family_models import write_family_model

    model = write_family_model("qwen3_moe", directory / "model")
    fused = AutoModelForCausalLM.from_pretrained(model)
    fused.save_pretrained(model, save_original_format=False)
    if find_spec("vllm") is None:
        (directory / "vllm.py").touch()
    short = ["data.max_prompt_length=256", "data.max_response_length=64"]
    return [f"model.name={model}", "rollout.engine=vllm", *short]


def _write_reward(text: str, directory: Path) -> list[str]:
    (file := directory / "reward.py").write_text(text)
    return [f"reward.custom_reward_function.path={file}"]


CHECKED = f"""{REWARD}
share = compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    CHECK
    return share(data_source, solution_str, ground_truth)
"""
RAISES = CHECKED.replace("CHECK", "assert ground_truth[-1] not in 'sc', 'no such word'")
SKIPS = CHECKED.replace("CHECK", "if len(ground_truth) > 8:\n        return None")


def _write_prompts(directory: Path, first: int = 0) -> list[str]:
    """Write the data of a run, from this row on."""
    words = [chr(97 + i % 26) + chr(97 + i // 26 % 26) + "na"[: i % 2 + 1] for i in range(400)]
    question = "Spell this word backward (example: sun -> nus): {}"
    rows = [{"prompt": question.format(w), "answer": w[::-1]} for w in words[first:]]
    (file := directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"data.train_files={file}", "data.dataset=", *_write_reward(REWARD, directory)]


def _stall_tool(directory: Path) -> list[str]:
    text = (Path(CALCULATOR).parent / "calculator.py").read_text()
    stalls = "        a % 2 or __import__('time').sleep(3600)\n        return a + b"
    (file := directory / "calculator.py").write_text(text.replace("        return a + b", stalls))
    return [f"env.path={file}"]


# fmt: off
CASES = (
    Case(
        "adapter", "vllm#42125", "every version is published with the adapter of the first one",
        "weights-unchanged", ["lora.rank=8", "lora.alpha=16", "optim.lr=1e-3"],
    ),
    Case(
        "experts", "NeMo-RL#3403", "the model's files have fused names for experts", ".experts.",
        write_files=_fuse_experts,
    ),
    Case(
        "old-weights", "NeMo-RL#4018", "replicas sample with the first weights after each load",
        "mismatch", ["async.max_staleness=0", "optim.lr=1e-3", "optim.lr_warmup_steps=0"],
    ),
    Case(
        "reward-raises", "NeMo-RL#431", "the reward raises on a part of the responses, for a 0",
        "reward-errors", write_files=partial(_write_reward, RAISES),
    ),
    Case(
        "dropped-groups", "prime-rl#2581", "the reward gives None for a part of the prompts",
        "dropped-groups", write_files=partial(_write_reward, SKIPS),
    ),
    Case(
        "skipped-prompts", "NeMo-RL#2519", "16 rows leave the data file while a run is stopped",
        "put back the files", write_files=_write_prompts,
        change=lambda directory: _write_prompts(directory, first=16)[:0],
    ),
    Case(
        "tokenizer", "verl#3720", "responses are encoded again for training, by another tokenizer",
        "mismatch",
    ),
    Case(
        "truncated", "trl#5697", "most responses are cut off, and scored", "truncated",
        ["data.max_response_length=8"],
    ),
    Case(
        "learning-rate", "prime-rl#1095", "a cosine schedule is resumed with more steps",
        "learning-rate", ["optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps=1"],
        change=lambda _: [f"trainer.total_training_steps={8 * STEPS}"],
    ),
    Case("reference", "NeMo-RL#3048", "the reference model is the policy", "kl-zero", KL),
    Case("kl-sign", "ToolRL#52", "the KL term has the wrong sign", "kl-negative", KL),
    Case(
        "stalled-tool", "verl#1948", "the tool never returns for half of the calls",
        "tool-timeouts", ["env.tool_timeout_s=2"], config=CALCULATOR, write_files=_stall_tool,
    ),
)
# fmt: on
