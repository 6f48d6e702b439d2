"""What a training step costs that reads each prompt once, beside one of padded rows.

Reads   RUN: a finished run of the quickstart on this machine, for its batches; configs/
Gives   one JSON line per shape of a batch: tokens, CPU seconds of a step with padded rows and with
        prompts once, and their ratio

Both learners are in one process of one thread and take turns, batch after batch; a figure is the
median over the rounds. The first round is not counted.

    python tools/bench/prompts_once.py RUN [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from laminar.actors.batch_rows import sample_of
from laminar.analysis.trained_steps import trained
from laminar.config import load
from laminar.run.directory import STORE_FILE
from laminar.storage import messages as m
from laminar.storage.books import open_tables
from laminar.storage.handlers import Handlers
from laminar.storage.rules import Span
from laminar.tasks.tokenizer import load_tokenizer, tokenizer_size
from laminar.training.learner import Learner
from laminar.training.model import load_policy
from laminar.training.steps import TrainSample

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = 8
LONGEST = 16_384
Batches = Sequence[Sequence[TrainSample]]


def of_run(run: Path) -> Batches:
    """Three steps: of the beginning, the middle and the end."""
    steps = trained(run).steps
    with open_tables(run / STORE_FILE) as tables:
        store = Handlers(tables)
        return [
            [_stored(store, name) for name in steps[i].trajectories]
            for i in (2, len(steps) // 2, len(steps) - 2)
        ]


def _stored(store: Handlers, name: str) -> TrainSample:
    reply = store.answer(m.Fetch(ids=(name,), with_prompt=False))
    assert isinstance(reply, m.FetchReply)
    return sample_of(reply.trajectories[0])


def made_up(prompt: int, mean: int, seed: int) -> Batches:
    """One group; its responses have lognormal lengths of this mean."""
    rng = np.random.default_rng(seed)
    prompt_ids = rng.integers(1, 50, prompt).astype(np.int32)
    lengths = rng.lognormal(np.log(mean) - 0.32, 0.8, SIBLINGS).astype(int).clip(1, LONGEST)
    group = []
    for k, length in enumerate(lengths.tolist()):
        group.append(
            TrainSample(
                sample_id=f"0.0.{k}",
                group_id="0.0",
                prompt_ids=prompt_ids,
                response_ids=rng.integers(1, 50, length).astype(np.int32),
                logprobs=np.full(length, -4.0, np.float32),
                reward=float(rng.random()),
                temperature=1.0,
                truncated=False,
                spans=(Span("rollout-0", 0, 0, length),),
            )
        )
    return [group]


def learner(*, prompts_once: bool, max_tokens: int) -> Learner:
    config = load(
        [ROOT / "configs/quickstart.toml"],
        [
            f"trainer.micro_batch_tokens={max_tokens}",
            "algorithm.rollout_correction.mismatch_limit=1e9",
        ],
    )
    name = str(ROOT / "configs/models/spell-0.6m")
    policy = load_policy(name, "cpu", tokenizer_size=tokenizer_size(load_tokenizer(name)))
    return Learner(config, replace(policy, prompts_once=prompts_once))


def measured(batches: Batches, max_tokens: int, rounds: int) -> dict[str, float]:
    """CPU seconds of a step by kind."""
    learners = {
        "padded": learner(prompts_once=False, max_tokens=max_tokens),
        "once": learner(prompts_once=True, max_tokens=max_tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(rounds + 1):
        for name, one in learners.items():
            begun = time.process_time()
            for i, batch in enumerate(batches):
                one.train_step(batch, 100 + turn * len(batches) + i)
            seconds[name].append((time.process_time() - begun) / len(batches))
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def tokens(batches: Batches) -> dict[str, float]:
    """A step's, without padding: of all sequences, and those that are not read twice."""
    read = sum(s.length for batch in batches for s in batch)
    prompts = {(i, s.group_id): len(s.prompt_ids) for i, batch in enumerate(batches) for s in batch}
    answers = sum(len(s.response_ids) - 1 for batch in batches for s in batch)
    return {
        "tokens": read / len(batches),
        "unique": (sum(prompts.values()) + answers) / len(batches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes: Mapping[str, tuple[Batches, int]] = {
        "quickstart": (of_run(options.run), 2048),
        "prompt of 2,000, responses of 500": (made_up(2000, 500, 1), 4096),
        "prompt of 300, responses of 3,000": (made_up(300, 3000, 2), 4096),
    }
    for name, (batches, max_tokens) in shapes.items():
        found = measured(batches, max_tokens, options.rounds)
        ratio = found["once"] / found["padded"]
        line = {"shape": name, **tokens(batches), **found, "once / padded": ratio}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}
        print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
