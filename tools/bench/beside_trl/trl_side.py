"""TRL's half of tools/bench/beside_trl: the same GRPO run with TRL's trainer.

Reads   JOB: a JSON file from the other half, with the rows and all settings
Writes  OUT/rank-N.jsonl: a line after every step, with the reward and the cumulative CPU seconds of
        this process and of the parts of its steps; OUT/step-N/: the model after every few steps

Runs under torch.distributed.run with the Python of TRL's environment, with Laminar on its path for
the scorer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from laminar.config import load_config
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.rewards.results import RewardCall
from laminar.tasks.rewards.reward_functions import open_scorer, reward_spec

PARTS = {
    "generate": "_generate_single_turn",
    "score": "_calculate_rewards",
    "forward": "compute_loss",
    "generate, score and what is around them": "_prepare_inputs",
    "step": "training_step",
}


class Lines(TrainerCallback):
    """A log of rewards and CPU seconds by step."""

    def __init__(self, path: Path, save_every: int) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._save_every = save_every
        self._file = path.open("w", buffering=1)

    def timed(self, trainer: GRPOTrainer, part: str, method: str) -> None:
        """Measure the CPU time of a method of the trainer."""
        inner: Callable[..., Any] = getattr(trainer, method)

        def outer(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[part] += time.process_time() - begun

        setattr(trainer, method, outer)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if args.process_index == 0 and not state.global_step % self._save_every:
            kwargs["model"].save_pretrained(Path(args.output_dir) / f"step-{state.global_step}")
        if "reward" in logs:
            cpu = {"all": time.process_time(), **self.seconds}
            line = {"step": state.global_step, "reward": float(logs["reward"]), "cpu": cpu}
            self._file.write(json.dumps(line) + "\n")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    config = load_config([Path(path) for path in job["configs"]], job["overrides"])
    scorer = open_scorer(reward_spec(config))
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    rows = {row["index"]: PromptRow(**row) for row in job["rows"]}

    def reward(completions: list[Any], row_index: list[int], **_: Any) -> list[float]:
        found = []
        for index, said in zip(row_index, completions, strict=True):
            call = RewardCall(rows[index], [(said[0]["content"], [])])
            found.append(float(scorer(call)[0].reward or 0.0))
        return found

    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row.prompt}], "row_index": row.index}
            for row in rows.values()
        ]
    )
    for example, ids in zip(data, job["prompt_ids"], strict=True):
        templated = tokenizer.apply_chat_template(
            example["prompt"], add_generation_prompt=True, return_dict=False
        )
        if list(templated) != ids:
            raise RuntimeError(f"row {example['row_index']}: the token ids differ from Laminar's")

    lines = Lines(Path(job["out"]) / f"rank-{os.environ['RANK']}.jsonl", job["save_every"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=job["out"], **job["grpo"]),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[lines],
    )
    for part, method in PARTS.items():
        lines.timed(trainer, part, method)
    trainer.train()


if __name__ == "__main__":
    main()
