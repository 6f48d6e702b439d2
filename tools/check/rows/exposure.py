"""Rows 26 and 27: a run never exposes its secret and listens only on configured addresses.

Reads   runs of real processes: their files, output, command lines, environments and sockets
Gives   ROWS; forms_of, the byte strings to search for; hits, the places where they were found

Row 26 searches for the secret and for each key that is derived from it, in every form in which they
might be written. Row 27 inspects all sockets of all processes while they work. Processes are
inspected from outside, so this includes reward workers and the process of Weights & Biases.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from zmq.utils import z85

from laminar.run.directory import SECRET_FILE
from laminar.run.secret import Secret, read_secret
from tools.check.rows import strangers
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.real_run import ROOT, Run, laminar

QUICKSTART = "configs/recipes/words/run.toml"
SMALL = (
    "trainer.save_freq=2",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=0",
    "trainer.total_training_steps=2000",  # stopped after the inspection
)
COMMANDS = (("report",), ("samples",), ("log", "dump", "-n", "20"), ("audit",))
"""Commands that show a run to people; the first one writes report.html."""
KEYS = ("curve-server", "curve-client", "bulk")
"""Uses of the keys that are derived from the secret and grant access."""
ALL_INTERFACES = ("0.0.0.0", "::", "")


@dataclass
class Shown:
    """Everything that one run exposed."""

    listening: set[str]  #: IP addresses of listening sockets
    hits: list[str]  #: places where the secret or a key was found
    processes: int
    files: int
    scored: bool  #: whether a reward worker was among the processes
    boards: bool  #: whether files of Weights & Biases were among the files


# --- row 26 -----------------------------------------------------------------------------------


def forms_of(secret: Secret, content: bytes) -> dict[str, bytes]:
    """Return the secret and its keys in every form in which they may be written, by name."""
    hidden = {"secret": content, **{use: secret.derive_key(use) for use in KEYS}}
    return {
        f"{name} as {form}": written
        for name, raw in hidden.items()
        for form, written in (
            ("bytes", raw),
            ("hex", raw.hex().encode()),
            ("HEX", raw.hex().upper().encode()),
            ("base64", base64.b64encode(raw).rstrip(b"=")),
            ("base64 for addresses", base64.urlsafe_b64encode(raw).rstrip(b"=")),
            ("z85", z85.encode(raw)),
            ("Python shows it", repr(raw)[2:-1].encode()),
        )
    }


def hits(forms: Mapping[str, bytes], places: Mapping[str, bytes]) -> list[str]:
    """Return the places that contain any of the forms."""
    return [
        f"{where}: {what}"
        for where, content in places.items()
        for what, form in forms.items()
        if form in content
    ]


def _processes(process: psutil.Process) -> Iterator[tuple[psutil.Process, dict[str, bytes]]]:
    """Yield a process and all its descendants, with their command lines and environments."""
    for each in (process, *process.children(recursive=True)):
        place = Path("/proc") / str(each.pid)
        try:
            yield each, {name: (place / name).read_bytes() for name in ("cmdline", "environ")}
        except (OSError, psutil.NoSuchProcess):
            pass  # it ended meanwhile, like short-lived processes that query the machine


def _files(directory: Path) -> dict[str, bytes]:
    """Read all files of a directory except the secret file."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != SECRET_FILE)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


# --- inspection of a run ----------------------------------------------------------------------


def look_at(config: str, settings: Sequence[str]) -> Shown:
    """Inspect a run while it works and after it ended; raise BadRun if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        with Run(Path(directory) / "run", config, settings) as training:
            training.until_step(1)
            run_dir = training.run_dir
            forms = forms_of(read_secret(run_dir), (run_dir / SECRET_FILE).read_bytes())
            living = list(_processes(psutil.Process(training.train.pid)))
            listening = {ip for process, _ in living for ip in _listening(process)}
            training.drain()
        shown = {
            f"{name} of {kept['cmdline'].decode(errors='replace')}": content
            for _, kept in living
            for name, content in kept.items()
        }
        for words in COMMANDS:
            done = subprocess.run(laminar(*words, str(run_dir)), capture_output=True, cwd=ROOT)
            shown[f"output of {' '.join(words)}"] = done.stdout + done.stderr
        files = _files(Path(directory))
    return Shown(
        listening=listening,
        hits=hits(forms, {**shown, **files}),
        processes=len(living),
        files=len(files),
        scored=any("rewards.worker" in name for name in shown),
        boards=any("/wandb/" in name for name in files),
    )


@functools.cache
def quickstart() -> Shown:
    """Inspect the quickstart once for both rows, with the loggers that are installed."""
    loggers = ["tensorboard", *(["wandb"] if importlib.util.find_spec("wandb") else [])]
    os.environ["WANDB_MODE"] = "offline"
    return look_at(QUICKSTART, (*SMALL, f"trainer.logger={loggers}"))


def secrets(gate: Gate) -> Figure:
    shown = quickstart()
    boards = "" if shown.boards else ", without Weights & Biases, which is not installed"
    reached = (
        f"{len(shown.hits)} hits in {shown.files} files, the command lines and environments of "
        f"{shown.processes} processes, {len(COMMANDS)} outputs{boards}"
    )
    passed = shown.scored and not shown.hits
    return Figure(reached, passed, "\n".join(shown.hits) or "no reward worker was running")


# --- row 27 -----------------------------------------------------------------------------------


def _listening(process: psutil.Process) -> set[str]:
    """Return the addresses of a process's sockets that accept connections or datagrams."""
    try:
        found = process.net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    waits = [each for each in found if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]
    return {each.laddr.ip if each.laddr else "" for each in waits if not each.raddr}


def own_address() -> str:
    """Return an address of this machine that others can reach, or an empty string."""
    cards = [address for found in psutil.net_if_addrs().values() for address in found]
    ips = [each.address for each in cards if each.family.name == "AF_INET"]
    return next((ip for ip in ips if not ip.startswith("127.")), "")


def listeners(gate: Gate) -> Figure:
    """Inspect the quickstart, an emulated run on two loopback addresses, and one beyond them."""
    small = (*strangers.SMALL, "rollout.replicas=1")
    wanted = {"127.0.0.1"}
    looked = [("quickstart", wanted, quickstart().listening)]
    runs = [("two machines", {"127.0.0.1", "127.0.0.2"}, "run.nodes=2")]
    if own := own_address():
        runs.append((f"on {own}", {own}, f"coordinator.host={own}"))
    for name, wanted, setting in runs:
        looked.append((name, wanted, look_at(strangers.CONFIG, (*small, setting)).listening))
    wrong = [
        f"{name}: {sorted(found)} instead of {sorted(wanted)}"
        for name, wanted, found in looked
        if found != wanted
    ]
    everywhere = [name for name, _, found in looked if found & set(ALL_INTERFACES)]
    reached = f"{len(looked) - len(wrong)} of {len(looked)} runs listen only where configured"
    beyond = "" if own else "; loopback only: this machine has no other address"
    return Figure(f"{reached}, {len(everywhere)} on all interfaces{beyond}", not wrong, str(wrong))


ROWS = (
    Row(26, "the secret of a run and its keys are never exposed", "0 hits", "0 hits", secrets),
    Row(
        27,
        "a run listens only on the configured addresses, loopback by default",
        "quickstart, two machines on loopback, one address beyond it",
        "the same",
        listeners,
    ),
)
