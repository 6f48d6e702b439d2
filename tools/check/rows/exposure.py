"""Rows 26 and 27: what a run shows of itself: its secret nowhere, ports only where it is told.

Reads   runs of real processes: their files, output, command lines, environments and sockets
Gives   ROWS; forms_of and hits, what is searched for and where it was found

Row 26 searches for the secret and for each key that is derived from it, in the forms in which they
might be written. Row 27 looks at all sockets of all processes while they work. A process is looked
at from outside, so also one that is not ours: a reward worker, or the process of Weights & Biases.
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
from tools.kit.real_run import ROOT, BadRun, Run, laminar

QUICKSTART = "configs/quickstart.toml"
SMALL = (
    "trainer.save_freq=2",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=0",
    "trainer.total_training_steps=2000",  # it is ended when it was looked at
)
COMMANDS = (("report",), ("samples",), ("log", "tail"), ("audit",))
"""What shows a run to a person; the first one writes report.html."""
KEYS = ("curve-server", "curve-client", "bulk")
"""What is derived from the secret and lets somebody in."""
ALL_INTERFACES = ("0.0.0.0", "::", "")


@dataclass
class Shown:
    """What was seen of one run."""

    listening: set[str]  #: IP addresses
    hits: list[str]  #: places where the secret, or a key, was found
    processes: int
    files: int
    scored: bool  #: a reward worker was among the processes
    boards: bool  #: files of Weights & Biases were among them


# --- row 26 -----------------------------------------------------------------------------------


def forms_of(secret: Secret, content: bytes) -> dict[str, bytes]:
    """The secret and its keys, as they may be written; by a name for each."""
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
    """Where any of them is."""
    return [
        f"{where}: {what}"
        for where, content in places.items()
        for what, form in forms.items()
        if form in content
    ]


def _processes(process: psutil.Process) -> Iterator[tuple[psutil.Process, dict[str, bytes]]]:
    """It and all its children, each with its command line and environment."""
    for each in (process, *process.children(recursive=True)):
        place = Path("/proc") / str(each.pid)
        try:
            yield each, {name: (place / name).read_bytes() for name in ("cmdline", "environ")}
        except (OSError, psutil.NoSuchProcess):
            pass  # it has ended since, as those do that look at the machine


def _files(directory: Path) -> dict[str, bytes]:
    """All but the secret's own."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != SECRET_FILE)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


# --- a run that is looked at ------------------------------------------------------------------


def look_at(config: str, settings: Sequence[str]) -> Shown:
    """A run that works, then one that has ended; BadRun if it does not end well."""
    with tempfile.TemporaryDirectory() as directory:
        training = Run(Path(directory) / "run", config, settings)
        try:
            training.until_step(1)
            run_dir = training.run_dir
            forms = forms_of(read_secret(run_dir), (run_dir / SECRET_FILE).read_bytes())
            living = list(_processes(psutil.Process(training.train.pid)))
            listening = {ip for process, _ in living for ip in _listening(process)}
            training.drain()
            if code := training.end():
                raise BadRun(f"code {code}: {training.said()}")
        finally:
            training.close()
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
        scored=any("reward_worker" in name for name in shown),
        boards=any("/wandb/" in name for name in files),
    )


@functools.cache
def quickstart() -> Shown:
    """With the boards, as far as they are installed; both rows look at it."""
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
    return Figure(reached, passed, "\n".join(shown.hits) or "there was no reward worker")


# --- row 27 -----------------------------------------------------------------------------------


def _listening(process: psutil.Process) -> set[str]:
    """The addresses of its sockets that take connections, or datagrams of anybody."""
    try:
        found = process.net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    waits = [each for each in found if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]
    return {each.laddr.ip if each.laddr else "" for each in waits if not each.raddr}


def own_address() -> str:
    """One of this machine that others can reach; empty: it has none."""
    cards = [address for found in psutil.net_if_addrs().values() for address in found]
    ips = [each.address for each in cards if each.family.name == "AF_INET"]
    return next((ip for ip in ips if not ip.startswith("127.")), "")


def listeners(gate: Gate) -> Figure:
    """Quickstart; an emulated run of two machines on loopback; one on an address beyond it."""
    small = (*strangers.SMALL, "rollout.replicas=1")
    wanted = {"127.0.0.1"}
    looked = [("quickstart", wanted, quickstart().listening)]
    runs = [("two machines", {"127.0.0.1", "127.0.0.2"}, "run.nodes=2")]
    if own := own_address():
        runs.append((f"on {own}", {own}, f"coordinator.host={own}"))
    for name, wanted, setting in runs:
        looked.append((name, wanted, look_at(strangers.CONFIG, (*small, setting)).listening))
    wrong = [
        f"{name}: {sorted(found)} and not {sorted(wanted)}"
        for name, wanted, found in looked
        if found != wanted
    ]
    everywhere = [name for name, _, found in looked if found & set(ALL_INTERFACES)]
    reached = f"{len(looked) - len(wrong)} of {len(looked)} runs listen where they are told"
    beyond = "" if own else "; none beyond loopback: this machine has no other address"
    return Figure(f"{reached}, {len(everywhere)} on all interfaces{beyond}", not wrong, str(wrong))


ROWS = (
    Row(26, "the secret of a run and its keys appear nowhere", "0 hits", "0 hits", secrets),
    Row(
        27,
        "a run listens on the addresses that it is told, loopback by default, and on no other",
        "quickstart, two machines on loopback, one address beyond it",
        "the same",
        listeners,
    ),
)
