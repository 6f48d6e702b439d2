"""Benchmark of the quickstart against TRL: seconds per step and until a held-out score.

Reads   configs/recipes/words/run.toml; --venv: a Python environment with TRL 1.16, made by
            python -m venv DIR
            DIR/bin/pip install trl==1.16.0 accelerate datasets
Writes  a temporary directory, removed at the end
Gives   one JSON line per run, and one with the ratios of the medians, Laminar ÷ TRL; a ratio below
        1 means that Laminar takes less time

Both train the same model on the same rows in the same order, in float32, with the scorer, batch
size and hyper-parameters of the quickstart. TRL runs two single-threaded processes, each with half
of every batch, and generates with transformers; Laminar runs its usual processes. Both use
Laminar's torch and transformers. Runs alternate. Neither evaluates during training; each saves its
model every few steps, and the saved models are evaluated afterwards in the same way: greedy
responses of transformers to the held-out prompts. A score is reached by the first saved model that
has it, at the end of its step. CPU seconds per step are given for Laminar by process, for TRL by
part of the step, summed over both processes.

    python -m tools.bench.beside_trl --venv DIR [--rounds 3] [--steps 60] [--score 0.93]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from laminar.config import Config, load_config
from laminar.core.scheduling.dispatch import permute_rows
from laminar.tasks.data.chat import encode_prompt
from laminar.tasks.data.prompts import load_prompts
from laminar.tasks.data.tokenizer import load_tokenizer
from laminar.tasks.rewards.results import RewardCall
from laminar.tasks.rewards.reward_functions import open_scorer, reward_spec

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs/recipes/words/run.toml"
TRL_SIDE = Path(__file__).with_name("trl_side.py")
PROCESSES = 2
FIRST = 5  #: warm-up steps, not measured
MEAN_OF = 5
SAVE_EVERY = 4
LIMIT_S = 900.0
TICK_S = 0.02
HERTZ = os.sysconf("SC_CLK_TCK")
Cpu = dict[str, float]


class HeldOut:
    """The held-out prompts of a config, for scoring models."""

    def __init__(self, config: Config) -> None:
        self._rows = load_prompts(config.data).held_out
        self._tokenizer = load_tokenizer(config.model.name)
        self._ids = [encode_prompt(self._tokenizer, row, config.data) for row in self._rows]
        self._most = config.data.max_response_length
        self._scorer = open_scorer(reward_spec(config))

    @torch.no_grad()
    def score(self, directory: Path) -> float:
        """Return the mean score of a model over all prompts."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        width = max(map(len, self._ids))
        pad = self._tokenizer.pad_token_id
        prompts = torch.tensor([[pad] * (width - len(ids)) + ids for ids in self._ids])
        read = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in self._ids])
        found = model.generate(
            input_ids=prompts, attention_mask=read, do_sample=False, max_new_tokens=self._most
        )
        texts = self._tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
        calls = (RewardCall(r, [(text, [])]) for r, text in zip(self._rows, texts, strict=True))
        return statistics.mean(self._scorer(call)[0].reward or 0.0 for call in calls)


@dataclass
class Course:
    """Progress of one run by step: seconds since its start, reward and cumulative CPU seconds."""

    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cpu: list[Cpu] = field(default_factory=list)
    models: list[tuple[int, Path]] = field(default_factory=list)  #: completed steps, directory

    def add(self, seconds: float, reward: float, cpu: Cpu) -> None:
        self.seconds.append(seconds)
        self.rewards.append(reward)
        self.cpu.append(cpu)

    def figures(self, held_out: HeldOut, score: float) -> dict[str, Any]:
        steps = len(self.seconds) - 1 - FIRST
        scores: dict[int, float] = {}
        for step, model in sorted(self.models):
            scores[step] = held_out.score(model)
            if scores[step] >= score:
                break
        reached = step if scores[step] >= score else None
        first, last = self.cpu[FIRST], sorted(self.cpu[-1].items(), key=lambda part: -part[1])
        return {
            "s_per_step": (self.seconds[-1] - self.seconds[FIRST]) / steps,
            "start_s": self.seconds[0],
            "reached_at_step": reached,
            "reached_s": None if reached is None else self.seconds[reached - 1],
            "scores": scores,
            "last_rewards": statistics.mean(self.rewards[-MEAN_OF:]),
            "cpu_s_per_step": {
                name: (seconds - first.get(name, 0.0)) / steps for name, seconds in last
            },
        }


def laminar(directory: Path, overrides: list[str]) -> Course:
    run = directory / "runs" / "beside"
    command = [sys.executable, "-m", "laminar.cli.main", "train", "-c", str(QUICKSTART)]
    command += [*overrides, "run.name=beside"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with _Started(command, directory, environment) as process:
        course, begun = Course(), time.monotonic()
        for line in _lines(run / "metrics.jsonl", process):
            if "reward/mean" in line and line["step"] > len(course.rewards):
                cpu = _cpu_of(process.pid)
                course.add(time.monotonic() - begun, line["reward/mean"], cpu)
    for facts in (run / "checkpoints").glob("*/trainer.json"):
        course.models.append((json.loads(facts.read_text())["step"], facts.parent))
    return course


def trl(directory: Path, python: Path, job: Mapping[str, Any]) -> Course:
    path = directory / "job.json"
    path.write_text(json.dumps({**job, "out": str(directory)}))
    command = [str(python), "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={PROCESSES}", str(TRL_SIDE), str(path)]
    libraries = sysconfig.get_paths()["purelib"]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{libraries}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with _Started(command, directory, environment) as process:
        course, begun = Course(), time.monotonic()
        for line in _lines(directory / "rank-0.jsonl", process):
            course.add(time.monotonic() - begun, line["reward"], {})
    ranks = [
        [json.loads(line)["cpu"] for line in (directory / f"rank-{n}.jsonl").open()]
        for n in range(PROCESSES)
    ]
    course.cpu = [_parts(found) for found in zip(*ranks, strict=True)]
    for model in directory.glob("step-*"):
        course.models.append((int(model.name.removeprefix("step-")), model))
    return course


def _parts(ranks: tuple[Cpu, ...]) -> Cpu:
    """Return the cumulative CPU seconds of both ranks, split into disjoint parts."""
    total: Cpu = defaultdict(float)
    for rank in ranks:
        for name, seconds in rank.items():
            total[name] += seconds
    around, step = total["generate, score and what is around them"], total["step"]
    return {
        "generate": total["generate"],
        "score": total["score"],
        "around both": around - total["generate"] - total["score"],
        "forward": total["forward"],
        "backward": step - around - total["forward"],
        "optimizer, logging, loading": total["all"] - step,
        "all": total["all"],
    }


class _Started:
    """A process with its output in a file, terminated if the block raises."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        self._output = directory / "output.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.terminate()
        if self._process.wait() != 0 and kind is None:
            text = self._output.read_text(errors="replace")
            raise RuntimeError(f"the run exited with {self._process.returncode}: {text[-3000:]}")


def _lines(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a file as they are written, until the process has ended."""
    deadline, rest, at = time.monotonic() + LIMIT_S, "", 0
    while True:
        ended = process.poll() is not None
        if path.exists():
            with path.open() as file:
                file.seek(at)
                rest += file.read()
                at = file.tell()
        *whole, rest = rest.split("\n")
        yield from map(json.loads, whole)
        if ended:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run is not done after {LIMIT_S:.0f} s")
        time.sleep(TICK_S)


def _cpu_of(root: int) -> Cpu:
    """Return the cumulative CPU seconds of a process and its descendants, by process name."""
    parents, names, seconds = {}, {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue
        pid, fields = int(stat.parent.name), tail.split()
        parents[pid], names[pid] = int(fields[1]), head.partition("(")[2]
        seconds[pid] = (int(fields[11]) + int(fields[12])) / HERTZ
    found: Cpu = defaultdict(float)
    for pid, name in names.items():
        above = pid
        while above not in (root, 0, 1):
            above = parents.get(above, 0)
        if above == root:
            found[name] += seconds[pid]
    return {**found, "all": sum(found.values())}


def job_of(config: Config, overrides: list[str], steps: int) -> dict[str, Any]:
    """Describe the run for TRL: rows in Laminar's order, settings by TRL's names."""
    rows = load_prompts(config.data).train
    order = permute_rows(config.seed, 0, len(rows))
    count = config.data.train_batch_size * steps
    chosen = [rows[i] for i in (order if config.data.shuffle else range(len(rows)))[:count]]
    tokenizer = load_tokenizer(config.model.name)
    optim, algorithm, rollout = config.optim, config.algorithm, config.rollout
    batch = config.data.train_batch_size * rollout.group_size
    return {
        "save_every": SAVE_EVERY,
        "configs": [str(QUICKSTART)],
        "overrides": overrides,
        "rows": [asdict(row) for row in chosen],
        "prompt_ids": [encode_prompt(tokenizer, row, config.data) for row in chosen],
        "grpo": {
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "per_device_train_batch_size": batch // PROCESSES,
            "num_generations": rollout.group_size,
            "max_completion_length": config.data.max_response_length,
            "max_steps": steps,
            "shuffle_dataset": False,
            "temperature": rollout.temperature,
            "learning_rate": optim.lr,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": optim.lr_warmup_steps,
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_epsilon": optim.eps,
            "weight_decay": optim.weight_decay,
            "max_grad_norm": optim.clip_grad,
            "optim": "adamw_torch_fused",
            "beta": 0.0,
            "epsilon": algorithm.clip_ratio_low,
            "epsilon_high": algorithm.clip_ratio_high,
            "scale_rewards": "group",
            "loss_type": "dapo",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": config.seed,
        },
    }


def ratios(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the ratios of the medians, Laminar ÷ TRL."""
    line = {}
    for name in ("s_per_step", "reached_s"):
        medians = [
            statistics.median(run[name] for run in found[side] if run[name] is not None)
            for side in ("laminar", "trl")
            if any(run[name] is not None for run in found[side])
        ]
        line[name] = medians[0] / medians[1] if len(medians) == 2 else None
    return line


def _shown(line: Mapping[str, Any]) -> str:
    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(part) for name, part in value.items()}
        return round(value, 3) if isinstance(value, float) else value

    return json.dumps({name: rounded(value) for name, value in line.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--score", type=float, default=0.93)
    options = parser.parse_args()
    overrides = [
        f"trainer.total_training_steps={options.steps}",
        "trainer.test_freq=0",
        "trainer.val_before_train=false",
        f"trainer.save_freq={SAVE_EVERY}",
        "trainer.max_ckpt_to_keep=0",
        "trainer.logger=[]",
    ]
    config = load_config([QUICKSTART], overrides)
    job, held_out = job_of(config, overrides, options.steps), HeldOut(config)
    torch.set_num_threads(1)
    python = (options.venv / "bin/python").absolute()
    found: dict[str, list[dict[str, Any]]] = {"laminar": [], "trl": []}
    for turn in range(options.rounds):
        for side, runs in found.items():
            with tempfile.TemporaryDirectory() as name:
                directory = Path(name)
                course = (
                    laminar(directory, overrides)
                    if side == "laminar"
                    else trl(directory, python, job)
                )
                load_now = os.getloadavg()[0]
                runs.append(course.figures(held_out, options.score))
            line = {"round": turn + 1, "side": side, "load": load_now, **runs[-1]}
            print(_shown(line), flush=True)
    print(_shown({"laminar / trl": ratios(found), "rounds": options.rounds}), flush=True)


if __name__ == "__main__":
    main()
