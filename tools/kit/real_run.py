"""A `laminar train` of real processes, for the benches and the scorecard: start, watch, end.

Gives   Run; check, of a run that has ended; print_lines, the main part of a bench; laminar, the
        command line; read_json; BadRun
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from laminar.run.directory import run_config

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
WAIT_S = 180.0
CHECKS = (("audit",), ("log", "replay"))
RETRAIN = ("retrain",)  #: skipped for emulated runs, which have nothing to retrain


class BadRun(RuntimeError):
    """A run that failed; the message says what it did instead."""


class Run:
    """A `laminar train` process and its run directory.

    At the end of its context the run must end with code 0; after an error it is stopped.
    """

    def __init__(
        self,
        run_dir: Path,
        config: str,
        settings: Sequence[str],
        environment: Mapping[str, str] = {},
        program: Path = ROOT,
    ) -> None:
        """Start it. `program`: directory that has the folder laminar."""
        self.run_dir, self.environment, self.program = run_dir, os.environ | environment, program
        place = [f"run.output_dir={run_dir.parent}", f"run.name={run_dir.name}"]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.output = run_dir.parent / f"{run_dir.name}.output"
        self.train = self._start("-c", config, *settings, *place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None and (code := self.end()):
                raise BadRun(f"exit code {code}: {self.said()}")
        finally:
            self.close()

    def resume(self, settings: Sequence[str] = ()) -> None:
        """Resume a run whose processes are all gone, with `self.program`."""
        self.train = self._start("--resume", str(self.run_dir), *settings)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        paths = str(self.program), self.environment.get("PYTHONPATH", "")
        with self.output.open("ab") as output:
            return subprocess.Popen(
                laminar("train", *words),
                cwd=self.program,
                env=self.environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def step(self) -> int:
        return int(read_json(self.run_dir / "status.json").get("step", -1))

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step} is done")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.train.poll() is not None:
                raise BadRun(f"the run ended before {what}: {self.said()}")
            if time.monotonic() > deadline:
                raise BadRun(f"waited {WAIT_S:.0f} s until {what}: {self.said()}")
            time.sleep(POLL_S)

    def drain(self) -> None:
        """Drain the run, two steps from now: `status.json` may lag behind by one."""
        self.until_step(self.step() + 2)
        self.train.send_signal(signal.SIGTERM)

    def end(self) -> int:
        return self.train.wait(WAIT_S * 5)

    def close(self) -> None:
        """Stop the run and leave nothing behind, even if it failed."""
        if self.train.poll() is None:
            self.train.send_signal(signal.SIGTERM)
            self.train.send_signal(signal.SIGTERM)
            self.train.wait(WAIT_S)

    def said(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])


def check(run_dir: Path, *, weights: bool = True) -> None:
    """Raise BadRun unless the books agree, the log replays and, if asked, the weights retrain."""
    retrain = weights and not run_config(run_dir).is_emulated
    for words in (*CHECKS, RETRAIN) if retrain else CHECKS:
        done = subprocess.run(
            laminar(*words, str(run_dir)), cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise BadRun(f"laminar {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def print_lines(
    measure: Callable[[Path, argparse.Namespace], Iterable[dict[str, Any]]],
    args: argparse.Namespace,
) -> int:
    """Print the lines of a bench as JSON; return 1 if its run fails."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = args.keep or Path(directory) / f"{measure.__name__.strip('_')}{os.getpid()}"
        try:
            for line in measure(run_dir.absolute(), args):
                print(json.dumps(line), flush=True)
        except BadRun as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def laminar(*words: str) -> list[str]:
    return [sys.executable, "-m", "laminar.cli.main", *words]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON of a run that may not have written it yet: then an empty dict."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}
