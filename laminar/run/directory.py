"""The names of everything in a run directory, in one place.

config.toml       the resolved configuration
secret            32 random bytes, by which the processes of the run recognise each other
run.lock          locked by every process of the run; processes/ says which they are
first_look.json   what was wrong before it started, by kind of warning; none: nothing
coordinator.json  where the coordinator listens; store-0.json and relay-0.json likewise
events/           the event log
store.sqlite      prompts, trajectories, tokens, rewards (and store.files/ for large payloads)
store.lock        locked by the process that writes it, whose incarnation stands in it
trainer.lock      locked by the ranks of the trainer, whose process ids stand in it
trainer_book.jsonl  the trainer's own record of trained ids, synced before each step is reported
logs/attempt_N/   JSON lines, one file per process; logs/latest points at the newest. Beside them
                  what a reward function or an environment prints, NAME.reward.log for replica NAME
                  what vLLM prints, NAME.engine.log likewise
timeline/         what each process did when
                  Of a log or a timeline FILE that has grown large, FILE.1, FILE.2, ... are the
                  parts before it; the oldest of them go
metrics.jsonl  tensorboard/  status.json  summary.json
report.html       figures, charts and samples, by `laminar report`; comparison.html of several runs
checkpoints/step_N/  the model after N steps as a Hugging Face directory, with its version, and with
                     the optimizer's state and what else the trainer needs to go on from there
origin/           of a fork: the checkpoint that it began with, and what it knows of the other run
slurm/            the batch scripts of a run that was submitted, and its jobs; what they print is in
                  logs/slurm/
refused/          checkpoints that were damaged when a trainer was to go on from them
export/           the trained model as a Hugging Face directory
"""

from __future__ import annotations

from pathlib import Path

from laminar.config import Config, ConfigError, load_config

CONFIG_FILE = "config.toml"
SECRET_FILE = "secret"
LOCK_FILE = "run.lock"
PROCESSES_DIR = "processes"
FIRST_LOOK_FILE = "first_look.json"
COORDINATOR_FILE = "coordinator.json"
EVENTS_DIR = "events"
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
VERSION_FILE = "version.msgpack"  #: of a checkpoint: the manifest of the version
RESUME_FILE = (
    "trainer.json"  #: of a checkpoint: what was trained, and how (training/trainer_state.py)
)
ORIGIN_DIR = "origin"
ORIGIN_FILE = "origin.json"  #: in ORIGIN_DIR: the origin of the first coordinator-started
REFUSED_DIR = "refused"
SLURM_DIR = "slurm"
EXPORT_DIR = "export"


def run_config(run_dir: Path) -> Config:
    """The configuration of a run that was named by its directory."""
    if not run_dir.is_dir():
        what = "is not a directory" if run_dir.exists() else "does not exist"
        raise ConfigError(f"{run_dir} {what}: name a run directory, such as runs/quickstart")
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is no run directory: it has no {CONFIG_FILE}")
    return load_config([], resolved=run_dir / CONFIG_FILE)


def older_parts(path: Path) -> list[tuple[int, Path]]:
    """(number, file) of the parts before a file that was set aside when it was large, oldest first.

    A lowest number above 1: there were older ones, which are gone.
    """
    named = ((file.name.removeprefix(f"{path.name}."), file) for file in _list_siblings(path))
    return sorted((int(number), file) for number, file in named if number.isdigit())


def _list_siblings(path: Path) -> list[Path]:
    return list(path.parent.iterdir()) if path.parent.is_dir() else []


def engine_log(run_dir: Path, name: str) -> Path:
    """What the engine of one replica prints, where it has processes of its own."""
    return run_dir / "logs" / "latest" / f"{name}.engine.log"


def reward_log(run_dir: Path, name: str) -> Path:
    """What the reward function of one replica prints."""
    return run_dir / "logs" / "latest" / f"{name}.reward.log"
