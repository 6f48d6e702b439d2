"""laminar train: a whole run on this machine.

Reads   the config files and overrides of the command line
Writes  the run directory
Starts  laminar-coord, and a laminar-node for each machine played; shows progress; starts a
        coordinator that died again

Ctrl-C once ends the run in good order (the step in training is completed, the model exported);
twice ends it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from laminar.analysis.report import summarize
from laminar.cli.preflight import Plan, check
from laminar.cli.progress import Progress
from laminar.config import Config, ConfigError, dumps, load
from laminar.observe.logs import new_attempt
from laminar.rundir import CHECKPOINTS_DIR, CONFIG_FILE, EXPORT_DIR, STATUS_FILE, SUMMARY_FILE

POLL_S = 0.25
FINAL_CODES = (0, 1, 2, 130)
"""Exit codes of a coordinator that has ended its run; any other is a death."""
COORDINATOR_RESTARTS_MAX = 20
NODE_EXIT_S = 30.0
"""How long the nodes may take to leave once the coordinator has ended."""

Process = subprocess.Popen[bytes]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="run everything on this machine")
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE")
    parser.add_argument("--dry-run", action="store_true", help="check and show the plan, no run")
    parser.add_argument("--run.name", dest="run_name", metavar="NAME")
    parser.add_argument("--output-dir", metavar="DIR")
    parser.add_argument("--max-steps", metavar="N")
    parser.add_argument(
        "--move-old", action="store_true", help="move an existing run directory aside"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.set_defaults(function=train, takes_overrides=True)


def train(arguments: argparse.Namespace) -> int:
    """Check, start, watch, report; returns the run's exit code."""
    config = load(arguments.config, _overrides(arguments))
    console = Console(soft_wrap=True)
    run_dir = config.run_dir
    if run_dir.exists() and not arguments.move_old and not arguments.dry_run:
        raise ConfigError(
            f"run directory {run_dir} exists; give another run.name, or --move-old to keep it "
            "under another name"
        )
    plan = check(config)
    show_plan(plan, console)
    if arguments.dry_run:
        return 0
    if run_dir.exists():
        console.print(f"moved the old run to {move_aside(run_dir)}", highlight=False)
    _prepare(plan.config, run_dir)
    code = Supervisor(plan.config, run_dir, console).run()
    try:
        show_summary(summarize(run_dir), run_dir, console)
    except ConfigError as error:  # the coordinator ended before it had logged anything
        console.print(f"no summary: {error}", highlight=False, markup=False)
    return code


def _overrides(arguments: argparse.Namespace) -> list[str]:
    named = {
        "run.name": arguments.run_name,
        "run.output_dir": arguments.output_dir,
        "trainer.total_training_steps": arguments.max_steps,
    }
    return [*arguments.overrides, *(f"{k}={v}" for k, v in named.items() if v is not None)]


def move_aside(run_dir: Path) -> Path:
    """Rename a run directory to the first free NAME.N."""
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(target)
    return target


def _prepare(config: Config, run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True)
        (run_dir / CONFIG_FILE).write_text(dumps(config))
        new_attempt(run_dir)
    except OSError as error:
        raise ConfigError(f"run directory {run_dir} cannot be written: {error}") from None


class Supervisor:
    """The daemons of a run on one machine: a coordinator, and a node for each machine played."""

    def __init__(self, config: Config, run_dir: Path, console: Console) -> None:
        self.config, self.run_dir = config, run_dir
        self.progress = Progress(run_dir, console)
        self._interrupts = 0
        self._restarts = 0

    def run(self) -> int:
        """Until the coordinator has ended; returns its exit code."""
        coordinator = self._start("laminar.cli.coord")
        nodes = [self._start_node(index) for index in range(self.config.run.nodes)]
        signal.signal(signal.SIGINT, self._interrupted)
        signal.signal(signal.SIGTERM, self._interrupted)
        forwarded = 0
        with self.progress:
            while True:
                time.sleep(POLL_S)
                self.progress.update()
                if self._interrupts > forwarded:
                    forwarded = self._interrupts
                    self._forward(coordinator, nodes)
                code = coordinator.poll()
                if code is None:
                    continue
                if code in FINAL_CODES or self._restarts >= COORDINATOR_RESTARTS_MAX:
                    break
                coordinator = self._restart(code)
        _wait(nodes)
        return code if code in FINAL_CODES else 1

    def _start_node(self, index: int) -> Process:
        """The first machine has the store and the trainer, all have a relay and replicas."""
        first = "store,trainer," if index == 0 else ""
        roles = f"{first}relay,rollout:{self.config.rollout.replicas}"
        address = f"127.0.0.{index + 1}"
        return self._start(
            "laminar.cli.node", "--name", f"node-{index}", "--roles", roles, "--host", address
        )

    def _start(self, module: str, *options: str) -> Process:
        """In a session of its own: Ctrl-C is ours to hand on."""
        return subprocess.Popen(
            [sys.executable, "-m", module, str(self.run_dir), *options], start_new_session=True
        )

    def _restart(self, code: int) -> Process:
        self._restarts += 1
        pause_s = self.config.recovery.coordinator_restart_ms / 1000
        self.progress.note(
            f"the coordinator ended with code {code}; starting it again in {pause_s:.1f} s, "
            "everything else goes on"
        )
        time.sleep(pause_s)
        return self._start("laminar.cli.coord")

    def _interrupted(self, number: int, frame: object) -> None:
        self._interrupts += 1

    def _forward(self, coordinator: Process, nodes: list[Process]) -> None:
        if self._interrupts == 1:
            self.progress.note(
                "stopping: the step in training is completed and the model exported; "
                "Ctrl-C again to stop at once"
            )
            coordinator.send_signal(signal.SIGINT)
            return
        for process in (coordinator, *nodes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        raise SystemExit(130)


def _wait(nodes: list[Process]) -> None:
    deadline = time.monotonic() + NODE_EXIT_S
    for node in nodes:
        try:
            node.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def show_plan(plan: Plan, console: Console) -> None:
    """What will happen, in a few lines; the first prompt as the model sees it."""
    c = plan.config
    lines = [
        f"run        {c.run_dir}",
        f"model      {c.model.name}",
        f"data       {plan.num_train} training prompts, {plan.num_held_out} held out "
        f"({plan.overlap} further rows left out because their prompt is held out)",
        f"steps      {plan.steps} of {c.data.train_batch_size} prompts x "
        f"{c.rollout.group_size} responses, staleness at most {c.async_.max_staleness}",
        f"replicas   {c.rollout.replicas * c.run.nodes} ({c.rollout.engine} engine, "
        f"{c.rollout.max_num_seqs} sequences each)",
        f"prompt 0   {plan.first_prompt!r}",
        f"as ids     {plan.first_prompt_ids}",
        f"ends with  {plan.end_ids}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def show_summary(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    """The last lines: what happened, and where to look next."""
    status = json.loads((run_dir / STATUS_FILE).read_text())
    lines = [""]
    if summary["failure"]:
        lines += [
            f"the run FAILED   {summary['failure']}",
            f"what led to it   {run_dir}/logs/latest/*.jsonl; laminar log tail {run_dir}",
        ]
    evaluations = summary["evaluations"]
    if len(evaluations) > 1:
        of_what = " (the exported model)" if evaluations[-1]["final"] else ""
        first, last = summary["eval_first"], summary["eval_last"]
        lines.append(f"held-out score   {first:.3f} -> {last:.3f}{of_what}")
    lines += [
        f"steps            {status['step']} in {summary['seconds']:.0f} s, "
        f"{summary['trajectories_trained']} trajectories trained, "
        f"{summary['weight_versions']} weight versions",
        f"staleness        mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']}",
        f"look at          {run_dir / SUMMARY_FILE}, {run_dir}/metrics.jsonl, "
        f"tensorboard --logdir {run_dir}/tensorboard",
        f"and try          laminar log replay {run_dir}; laminar audit {run_dir}",
    ]
    saved = len(list((run_dir / CHECKPOINTS_DIR).glob("step_*")))
    if saved:
        lines.append(f"checkpoints      {saved} in {run_dir / CHECKPOINTS_DIR}")
    if (run_dir / EXPORT_DIR).is_dir():
        lines.append(f"model            {run_dir / EXPORT_DIR}")
    for line in lines:
        console.print(line, highlight=False, markup=False)
