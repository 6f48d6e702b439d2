"""What a training step costs that reads each prompt once, beside one of padded rows.

Reads   RUN: a finished run of the quickstart on this machine, for its batches; configs/; a model
Gives   one JSON line per shape of a batch: tokens, seconds of a step with padded rows and with
        prompts once, their ratio, and how far gradients are from those of padded float32 rows

Both learners are in one process of one thread and take turns, batch after batch; a figure is the
median over the rounds. The first round is not counted. Seconds are the process's on a CPU, and the
wall's on a GPU, where both compute in bfloat16.

    python tools/bench/prompts_once.py --run RUN [--rounds 5]
    python tools/bench/prompts_once.py --device cuda --model MODEL --max-tokens 16384
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

from laminar.actors.batch_fetch import sample_of
from laminar.analysis.log.trained_steps import trained
from laminar.config import load
from laminar.run.directory import STORE_FILE
from laminar.storage import messages as m
from laminar.storage.books import open_tables
from laminar.storage.handlers import Handlers
from laminar.storage.rules import Span
from laminar.tasks.data.tokenizer import load_tokenizer, tokenizer_size
from laminar.training.learner import Learner
from laminar.training.model.packing import passes
from laminar.training.model.policy import Compute, LoadedPolicy, load_policy
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


def made_up(prompt: int, mean: int, seed: int, groups: int = 1) -> Batches:
    """One batch; responses have lognormal lengths of this mean."""
    rng = np.random.default_rng(seed)
    return [[s for i in range(groups) for s in _group(str(i), prompt, mean, rng)]]


def _group(name: str, prompt: int, mean: int, rng: np.random.Generator) -> list[TrainSample]:
    prompt_ids = rng.integers(1, 50, prompt).astype(np.int32)
    lengths = rng.lognormal(np.log(mean) - 0.32, 0.8, SIBLINGS).astype(int).clip(1, LONGEST)
    group = []
    for k, length in enumerate(lengths.tolist()):
        group.append(
            TrainSample(
                sample_id=f"{name}.{k}",
                group_id=name,
                prompt_ids=prompt_ids,
                response_ids=rng.integers(1, 50, length).astype(np.int32),
                logprobs=np.full(length, -4.0, np.float32),
                reward=float(rng.random()),
                temperature=1.0,
                truncated=False,
                spans=(Span("rollout-0", 0, 0, length),),
            )
        )
    return group


def learner(model: str, device: str, *, prompts_once: bool, max_tokens: int) -> Learner:
    config = load(
        [ROOT / "configs/quickstart.toml"],
        [
            f"trainer.micro_batch_tokens={max_tokens}",
            f"trainer.device={device}",
            "algorithm.rollout_correction.mismatch_limit=1e9",
        ],
    )
    policy = load_policy(model, device, tokenizer_size=tokenizer_size(load_tokenizer(model)))
    return Learner(config, replace(policy, prompts_once=prompts_once))


def measured(learners: Mapping[str, Learner], batches: Batches, rounds: int) -> dict[str, float]:
    """Seconds of a step by kind."""
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(rounds + 1):
        for name, one in learners.items():
            clock = Clock(one)
            for i, batch in enumerate(batches):
                one.train_step(batch, 100 + turn * len(batches) + i)
            seconds[name].append(clock.seconds() / len(batches))
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


class Clock:
    """The process's seconds on a CPU; on a GPU the wall's, until it has done what it was given."""

    def __init__(self, learner: Learner) -> None:
        self._gpu = learner.policy.device.type == "cuda"
        self._begun = self._now()

    def seconds(self) -> float:
        return self._now() - self._begun

    def _now(self) -> float:
        if not self._gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def apart(learners: Mapping[str, Learner], batches: Batches, max_tokens: int) -> dict[str, float]:
    """Of the gradient of the advantage-weighted log-probs of the first batch: the distance from
    that of padded float32 rows, in norm and relative to it."""
    rng = np.random.default_rng(0)
    batch = [replace(s, advantage=float(rng.normal())) for s in batches[0]]
    policy = learners["padded"].policy
    exact = _gradient(policy, batch, 1, torch.float32, once=False)  # row by row
    found = {}
    for name, one in learners.items():
        once = one.policy.reads_prompts_once(one.compute)
        same = replace(policy, prompts_once=once)  # of the same weights
        gradient = _gradient(same, batch, max_tokens, one.compute.dtype, once=once)
        found[f"apart, {name}"] = float((gradient - exact).norm() / exact.norm())
    return found


def _gradient(
    policy: LoadedPolicy,
    batch: Sequence[TrainSample],
    max_tokens: int,
    dtype: torch.dtype,
    *,
    once: bool,
) -> torch.Tensor:
    policy.model.zero_grad()
    for micro in passes(batch, max_tokens, policy.device, prompts_once=once):
        scores = policy.log_probs(micro.rows, micro.temperature, Compute(dtype, 1024))
        torch.autograd.backward(-(micro.advantages * scores.log_probs).sum())
    parts = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad()
    return torch.cat(parts)


def tokens(batches: Batches) -> dict[str, float]:
    """A step's, without padding: of all sequences, and those that are not read twice."""
    read = sum(s.length for batch in batches for s in batch)
    prompts = {(i, s.group_id): len(s.prompt_ids) for i, batch in enumerate(batches) for s in batch}
    answers = sum(len(s.response_ids) - 1 for batch in batches for s in batch)
    return {
        "tokens": read / len(batches),
        "unique": (sum(prompts.values()) + answers) / len(batches),
    }


def shapes(run: Path | None, max_tokens: int, groups: int) -> dict[str, tuple[Batches, int]]:
    """Batches and the budget of a pass by what they are."""
    found = {"quickstart": (of_run(run), 2048)} if run is not None else {}
    return found | {
        "prompt of 2,000, responses of 500": (made_up(2000, 500, 1, groups), max_tokens),
        "prompt of 300, responses of 3,000": (made_up(300, 3000, 2, groups), max_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a finished quickstart, whose batches are a shape")
    parser.add_argument("--model", default=str(ROOT / "configs/models/spell-0.6m"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a pass, of made-up shapes")
    parser.add_argument("--groups", type=int, default=1, help="of a made-up batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (batches, budget) in shapes(options.run, options.max_tokens, options.groups).items():
        learners = {
            kind: learner(
                options.model, options.device, prompts_once=kind == "once", max_tokens=budget
            )
            for kind in ("padded", "once")
        }
        found = apart(learners, batches, budget) | measured(learners, batches, options.rounds)
        ratio = found["once"] / found["padded"]
        line = {"shape": name, **tokens(batches), **found, "once / padded": ratio}
        rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()}
        print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
