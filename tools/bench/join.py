"""Time until a machine that joins a running run samples its first token, by phase.

Usage: python -m tools.bench.join [--joiners 1] [--rate 1600] [-c CONFIG] [key=value ...]
Prints one JSON line for each joiner and one for the run; exits 1 if a joiner has no token within
--within seconds, or its parts differ from the whole by more than 5 %; 2 for a usage error.

A run with real processes works on one machine; then `laminar-node` is started on --joiners others,
all at once. Each machine has an emulated network card (tools/bench/weights/network.py) of --rate
Mbit/s. Without -c the run is the quickstart with a random model of 131 M parameters, 500 MiB in
float32.

whole_s      from the start of laminar-node to the first sampled token of its replica
process_s    from the start to the first byte of weights, plus the time for which complete weights
             wait for the replica
transfer_s   from the first byte to the digest of the first loaded version
load_s       copy into the engine and digest of the bytes read; of a stream (rollout.load) only the
             rest of both after the last byte arrived
probe_s      the probe; prefill_s: from the report of the load to the first token, including the
             order to generate and the opening in the store, unless a stream had them before
parts_share  sum of these parts / whole_s; the rest is orders in transit
others       tokens/s of the other replicas, before the start and from then until the last joiner's
             first token
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.analysis.log.process_logs import LogLine, log_lines
from laminar.analysis.log.timeline import TimelineSpan, read_spans, read_steps
from laminar.names.ids import actor_name
from tools.bench.weights import network as net
from tools.kit.real_run import ROOT, laminar, read_json

CONFIG = "configs/recipes/words/run.toml"
MODEL = ("--layers", "6", "--hidden", "1024", "--vocab", "16384")
SMALL = (
    "rollout.replicas=1",
    "rollout.group_size=2",
    "rollout.max_num_seqs=4",
    "data.train_batch_size=2",
    "data.max_prompt_length=256",
    "data.max_response_length=48",
    "data.val_size=0",
    "trainer.test_freq=0",
    "trainer.total_training_steps=10000",  # stopped when the last joiner has a token
)
"""Quickstart settings that leave capacity of two cores for the joiners."""
POLL_S = 0.2
START_S, END_S = 300.0, 120.0
SHARE_MIN, SHARE_MAX = 0.95, 1.05


class Joiner:
    """A machine that joins the run."""

    def __init__(self, run_dir: Path, number: int) -> None:
        self.run_dir, self.node = run_dir, f"node-{number}"
        self.relay = actor_name("relay", self.node, 0)
        self.replica = actor_name("rollout", self.node, 0)
        module = [sys.executable, "-m", "laminar.cli.node", str(run_dir), "--name", self.node]
        words = [*module, "--roles", "relay,rollout:1", "--host", net.host(number)]
        self.called_ns = time.time_ns()
        self.process = subprocess.Popen(words, cwd=ROOT)

    def first_token_ns(self) -> int:
        """Return the end of the replica's first step with a token, or 0 if there is none."""
        steps = read_steps(self.run_dir, self.replica)
        given = steps[steps[:, 3] > 0]
        return int(given[0, 1]) if len(given) else 0

    def parts(self, lines: list[LogLine]) -> dict[str, float]:
        """Return the seconds of each part; raise KeyError or IndexError if a report is missing."""
        spans = read_spans(self.run_dir, self.replica)
        pulled = next(span for span in spans if span.state == "pulling")
        arrivals = [s for s in read_spans(self.run_dir, self.relay) if s.state == "receiving"]
        arrived = _of_version(arrivals, pulled.version)
        said = {line.name: line for line in reversed(lines) if line.process == self.replica}
        loaded, ready_ns = said["weights-loaded"].fields, said["replica-ready"].unix_ns
        begun_ns = arrivals[0].start_ns
        process_ns = begun_ns - self.called_ns + max(0, ready_ns - arrived.end_ns)
        load_ns = pulled.end_ns - max(pulled.start_ns, arrived.end_ns)
        return {
            "process_s": process_ns / 1e9,
            "transfer_s": (arrived.end_ns - begun_ns) / 1e9,
            "load_s": load_ns / 1e9 - loaded["probe_s"],
            "probe_s": loaded["probe_s"],
            "prefill_s": (self.first_token_ns() - pulled.end_ns) / 1e9,
        }


def _of_version(spans: list[TimelineSpan], version: int) -> TimelineSpan:
    return next(span for span in spans if span.version == version)


def tokens_per_s(run_dir: Path, replicas: list[str], start_ns: int, end_ns: int) -> float:
    """Return the total tokens per second of these replicas, by steps that ended in this period."""
    ended = 0
    for replica in replicas:
        steps = read_steps(run_dir, replica)
        ended += int(steps[(steps[:, 1] > start_ns) & (steps[:, 1] <= end_ns), 3].sum())
    return ended / (end_ns - start_ns) * 1e9


def inside(given: argparse.Namespace, run_dir: Path) -> int:
    """Make the run inside a private network namespace and return the exit code."""
    net.open_network(given.joiners + 1)
    place = [f"run.output_dir={run_dir.parent}", f"run.name={run_dir.name}"]
    words = laminar("train", "-c", given.config or CONFIG, *given.settings, *place)
    train = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    joiners: list[Joiner] = []
    try:
        status = run_dir / "status.json"
        _until("a second version", _published(status), START_S, train)
        time.sleep(given.before)
        net.limit(given.joiners + 1, given.rate)
        joiners = [Joiner(run_dir, number + 1) for number in range(given.joiners)]
        what = "a token of each joiner (--within)"
        _until(what, lambda: all(j.first_token_ns() for j in joiners), given.within, train)
        net.limit(given.joiners + 1)
        subprocess.run(laminar("stop", str(run_dir)), cwd=ROOT, timeout=END_S, capture_output=True)
        train.wait(END_S)
    finally:
        train.kill()
        for joiner in joiners:
            joiner.process.kill()
    return report(given, run_dir, joiners)


def report(given: argparse.Namespace, run_dir: Path, joiners: list[Joiner]) -> int:
    """Print the figures; return 1 if the parts do not add up to the whole."""
    lines = list(log_lines(run_dir))
    missed = 0
    for joiner in joiners:
        whole = (joiner.first_token_ns() - joiner.called_ns) / 1e9
        parts = joiner.parts(lines)
        share = sum(parts.values()) / whole
        missed += not SHARE_MIN <= share <= SHARE_MAX
        _tell(node=joiner.node, whole_s=whole, **parts, parts_share=share)
    called = min(joiner.called_ns for joiner in joiners)
    last = max(joiner.first_token_ns() for joiner in joiners)
    new = {joiner.replica for joiner in joiners}
    timelines = (run_dir / "timeline").glob("rollout-*.steps")
    others = [path.stem for path in timelines if path.stem not in new]
    before = tokens_per_s(run_dir, others, called - int(given.before * 1e9), called)
    during = tokens_per_s(run_dir, others, called, last)
    _tell(rate_mbit=given.rate, last_s=(last - called) / 1e9, others=[before, during])
    return int(missed > 0)


def _tell(**facts: Any) -> None:
    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return round(value, 3) if isinstance(value, float) else value

    print(json.dumps({name: rounded(value) for name, value in facts.items()}), flush=True)


def _published(status: Path) -> Callable[[], bool]:
    """Return a condition that holds once the run has published trained weights."""
    return lambda: read_json(status).get("newest_version", -1) >= 1


def _until(
    what: str, condition: Callable[[], bool], seconds: float, train: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if (code := train.poll()) is not None:
            print(f"join: the run exited with code {code}", file=sys.stderr)
            sys.exit(code or 1)
        if time.monotonic() > deadline:
            sys.exit(f"join: the run did not have {what} within {seconds:g} s")
        time.sleep(POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-c", "--config", default="", help="config instead of the quickstart")
    parser.add_argument("--joiners", type=int, default=1, help="machines that join at once")
    parser.add_argument("--rate", type=int, default=1600, help="rate of each card, Mbit/s")
    parser.add_argument("--before", type=float, default=20.0, help="seconds before they join")
    parser.add_argument(
        "--within", type=float, default=300.0, help="time limit of the first token, s"
    )
    parser.add_argument("--keep", type=Path, help="run directory to keep")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    for name in ("joiners", "rate", "within"):
        if (value := getattr(given, name)) <= 0:
            parser.error(f"--{name} {value:g}: give a number above 0")
    if given.inside:
        return inside(given, given.keep)
    prefix = net.namespace()
    if prefix is None:
        parser.error(
            "a private network for emulated network cards is unavailable; "
            "install iproute2 and run as root or allow user namespaces"
        )
    with tempfile.TemporaryDirectory() as directory:
        words = sys.argv[1:]
        if not given.keep:
            words += ["--keep", f"{directory}/join"]
        if not given.config:
            model = f"{directory}/model"
            make = [sys.executable, "tools/make/random_model.py", "--out", model, *MODEL]
            subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            words += [f"model.name={model}", *(s for s in SMALL if s not in given.settings)]
        command = [*prefix, sys.executable, "-m", "tools.bench.join", *words, "--inside"]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
