"""Latency that the endpoint of agents adds to a turn, and the memory of forked sessions.

Usage: python -m tools.bench.agent_turns [--steps 6] [--at-once 0] [--sessions 256] [--keep DIR]
Prints one JSON line, and exits with 1 if the run fails or its books do not agree.

A real run on this machine with one replica whose slots are never all in use. Its agent asks for
turns of at most four tokens, and notes when it sent each request and had read each reply; the log
of the replica has the times at which the engine got and ended the turn. Then sessions that wait for
their first turn are opened without a run. Agents use the openai SDK if it is installed.

With `--at-once 2`, turns do not queue for the cores of a small machine behind those of others.

to_engine_ms   from the request until the engine has it: parsing, template, store, coordinator
to_agent_ms    from the last token until the reply has been read: store, coordinator, endpoint
first_ms       as to_engine_ms, of first turns, whose session has begun with the request
sessions_mb    memory of all sessions and of the process that they are forked from (PSS)
endpoint_mb    growth of the process that serves them
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from laminar.config import load_config
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer
from laminar.tasks.environments.agents import Agents
from laminar.tasks.environments.turns import Session
from tools.kit.real_run import BadRun, Run, check

CONFIG = "configs/agents/openai_calculator.toml"
TURNS = 8  #: of a trajectory
AGENT = """
import json, os, time, urllib.request
{imports}

def solve(task, endpoint):
    messages = [dict(role="user", content="Calculate 1 + 1.")]
    for turn in range({turns}):
        body = json.dumps(dict(model="any", max_tokens=4, messages=messages)).encode()
        headers = {{"Authorization": "Bearer " + endpoint.api_key}}
        request = urllib.request.Request(endpoint.base_url + "/chat/completions", body, headers)
        sent = time.time()
        said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        line = json.dumps([endpoint.base_url, turn, sent, time.time()]) + "\\n"
        with open({notes!r}, "a") as notes:
            notes.write(line)
        messages += [said, dict(role="user", content="Again.")]
    return 1.0
"""
SETTINGS = (
    "rollout.replicas=1", "rollout.group_size=2", "rollout.max_num_seqs=16",
    "data.train_batch_size=4", f"env.max_turns={TURNS}", "env.max_context_tokens=400",
    "data.max_response_length=64", "data.val_size=0", "trainer.test_freq=0",
    "trainer.val_before_train=false", "trainer.save_freq=0", "optim.lr=0.0",
)  # fmt: skip


class NotedTurn(NamedTuple):
    """A turn as its agent saw it; times in seconds of the day's clock."""

    base_url: str
    turn: int
    sent: float
    read: float

    @property
    def trajectory_id(self) -> str:
        return self.base_url.split("/")[3].rpartition("-")[0]


def write_agent(directory: Path) -> tuple[str, Path]:
    """Return the agent, and the file of its notes."""
    notes, path = directory / "notes.jsonl", directory / "agent.py"
    imports = "import openai" if importlib.util.find_spec("openai") else ""
    path.write_text(AGENT.format(imports=imports, turns=TURNS, notes=str(notes)))
    return f"{path}:solve", notes


def measure_run(directory: Path, steps: int, at_once: int) -> dict[str, Any]:
    """Make the run and return its latencies; raise BadRun.

    `at_once`: sessions of the run at a time; 0: its default."""
    agent, notes = write_agent(directory)
    settings = [*SETTINGS, f"agents.run={agent}", f"trainer.total_training_steps={steps}"]
    settings.append(f"agents.max_sessions={at_once}")
    with Run(directory / "run", CONFIG, settings) as run:
        pass
    check(run.run_dir)
    noted = [NotedTurn._make(json.loads(line)) for line in notes.read_text().splitlines()]
    return compute_latencies(noted, read_times(run.run_dir))


def read_times(run_dir: Path) -> dict[tuple[str, str], list[float]]:
    """Return the times of each trajectory's starts and ends in an engine, in order."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for path in sorted((run_dir / "logs/latest").glob("rollout-*.jsonl")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            if told["event"] in ("trajectory-started", "trajectory-finished"):
                at = datetime.fromisoformat(told["timestamp"]).timestamp()
                found[told["trajectory"], told["event"]].append(at)
    return found


def compute_latencies(
    noted: list[NotedTurn], times: dict[tuple[str, str], list[float]]
) -> dict[str, Any]:
    """Return percentiles over the turns of trajectories that were started once for each turn."""
    later, first, back = list[float](), list[float](), list[float]()
    for one in noted:
        started = times[one.trajectory_id, "trajectory-started"]
        ended = times[one.trajectory_id, "trajectory-finished"]
        if len(started) == len(ended) == TURNS:  # else one was cut off by the end of the run
            (later if one.turn else first).append(started[one.turn] - one.sent)
            back.append(one.read - ended[one.turn])
    return {
        "turns": len(back),
        "first_ms": summarize(first),
        "to_engine_ms": summarize(later),
        "to_agent_ms": summarize(back),
    }


def summarize(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(1000 * float(np.percentile(seconds, q)), 2) for q in (50, 99)}


async def measure_memory(directory: Path, count: int) -> dict[str, Any]:
    """Open sessions that wait for their first turn, and return their memory."""
    agent, _ = write_agent(directory)
    settings = [*SETTINGS, f"agents.run={agent}", f"agents.max_sessions={count}"]
    config = load_config([CONFIG], settings)
    tokenizer = load_tokenizer(config.model.name)
    ends = end_ids(config.model.name, tokenizer)
    agents = Agents(config, tokenizer, ends, lambda ids: str(tokenizer.decode(ids)))
    row, here = PromptRow(0, "Go.", None, {}, "bench"), psutil.Process()
    try:
        await agents.start()
        before, known = here.memory_full_info().uss, {p.pid for p in here.children(recursive=True)}
        began = asyncio.get_running_loop().time()
        sessions = [Session(f"0.0.{i}", 1, 0, row, "train") for i in range(count)]
        await asyncio.gather(*map(agents.reset, sessions))
        seconds = asyncio.get_running_loop().time() - began
        children = here.children(recursive=True)
        assert len({p.pid for p in children} - known) == count
        return {
            "sessions": count,
            "sessions_mb": round(sum(list_bytes(children)) / 1e6, 1),
            "endpoint_mb": round((here.memory_full_info().uss - before) / 1e6, 1),
            "opened_s": round(seconds, 2),
        }
    finally:
        await agents.close()


def list_bytes(processes: list[psutil.Process]) -> Iterator[int]:
    """Yield the PSS of processes."""
    for process in processes:
        yield int(process.memory_full_info().pss)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=0, help="sessions of the run at a time")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            found = measure_run(directory, given.steps, given.at_once)
        except BadRun as failed:
            print(failed, file=sys.stderr)
            return 1
        print(json.dumps(found | asyncio.run(measure_memory(directory, given.sessions))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
