"""The names of all files and directories in a run directory.

config.toml       the resolved configuration
objects/          functions and rows that a program passed to laminar.train (run/user_code.py)
secret            32 random bytes, by which the processes of the run recognise each other
run.lock          locked by every process of the run; processes/ names them
first_look.json   problems found before the start, by kind of warning; absent if there were none
coordinator.json  the coordinator's address; store-0.json, relay-0.json: those of the other servers
events/           the event log
facts/            tables made of it; they can be removed, and are built again
store.sqlite      prompts, trajectories, tokens, rewards (and store.files/ for large payloads)
store.lock        locked by the process that writes the store; holds its incarnation
trainer.lock      locked by the ranks of the trainer; holds their process ids
trainer_book.jsonl  the trainer's own record of trained ids, synced before each step is reported
logs/attempt_N/   JSON lines, one file per process; logs/latest points at the newest. Also the
                  output of a reward function or an environment, NAME.reward.log for replica NAME,
                  and that of vLLM, NAME.engine.log
timeline/         activity of each process over time
                  A large log or timeline FILE is split: FILE.1, FILE.2, ... are the earlier parts,
                  of which the oldest are removed
metrics.jsonl  tensorboard/  status.json  summary.json
report.html       figures, charts and samples, by `laminar report`; comparison.html of several runs
checkpoints/step_N/  the model after N steps as a Hugging Face directory, with its version, the
                     optimizer's state and all else that the trainer needs to resume from it
origin/           of a fork: the checkpoint that it began with, and facts about the other run
slurm/            the batch scripts and jobs of a submitted run; their output is in logs/slurm/
refused/          checkpoints that a trainer could not load because they were damaged
export/           the trained model as a Hugging Face directory
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from laminar.config import Config, ConfigError, load_config

CONFIG_FILE = "config.toml"
OBJECTS_DIR = "objects"
SECRET_FILE = "secret"
LOCK_FILE = "run.lock"
PROCESSES_DIR = "processes"
FIRST_LOOK_FILE = "first_look.json"
COORDINATOR_FILE = "coordinator.json"
EVENTS_DIR = "events"
FACTS_DIR = "facts"
STORE_FILE = "store.sqlite"
TRAINER_LOCK_FILE = "trainer.lock"
TRAINER_BOOK_FILE = "trainer_book.jsonl"
LOGS_DIR = "logs"
TIMELINE_DIR = "timeline"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
STATUS_FILE = "status.json"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
CHECKPOINTS_DIR = "checkpoints"
VERSION_FILE = "version.msgpack"  #: in a checkpoint: the manifest of the version
RESUME_FILE = (
    "trainer.json"  #: in a checkpoint: what was trained, and how (training/trainer_state.py)
)
ORIGIN_DIR = "origin"
ORIGIN_FILE = "origin.json"  #: in ORIGIN_DIR: the origin of the first coordinator-started
REFUSED_DIR = "refused"
SLURM_DIR = "slurm"
EXPORT_DIR = "export"


def run_config(run_dir: Path) -> Config:
    """Load the configuration of a run from its directory."""
    if not run_dir.is_dir():
        what = "is not a directory" if run_dir.exists() else "does not exist"
        raise ConfigError(f"{run_dir} {what}: name a run directory, such as runs/quickstart")
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    return load_config([], resolved=run_dir / CONFIG_FILE)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the coordinator's latest status; empty before its first report."""
    try:
        found: dict[str, Any] = json.loads((run_dir / STATUS_FILE).read_bytes())
        return found
    except (OSError, ValueError):
        return {}


def older_parts(path: Path) -> list[tuple[int, Path]]:
    """Return (number, file) of the earlier parts of a file that is split when large, oldest first.

    If the lowest number is above 1, older parts have been removed.
    """
    named = ((file.name.removeprefix(f"{path.name}."), file) for file in _list_siblings(path))
    return sorted((int(number), file) for number, file in named if number.isdigit())


def list_parts(newest: Path) -> list[Path]:
    """Return all parts of such a file, oldest first."""
    return [*(path for _, path in older_parts(newest)), newest]


def _list_siblings(path: Path) -> list[Path]:
    return list(path.parent.iterdir()) if path.parent.is_dir() else []


def engine_log(run_dir: Path, name: str) -> Path:
    """Return the path for the output of a replica's engine, if that has separate processes."""
    return run_dir / "logs" / "latest" / f"{name}.engine.log"


def reward_log(run_dir: Path, name: str) -> Path:
    """Return the path for the output of a replica's reward function."""
    return run_dir / "logs" / "latest" / f"{name}.reward.log"
