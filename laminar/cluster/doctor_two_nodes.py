"""Mutual checks of two machines of a cluster, run by laminar doctor in a short job.

Reads   DIRECTORY/config.toml, the other machine's files there, its clock
Writes  DIRECTORY; a socket between the two; standard output, JSON in short lines
Gives   check_this_machine, the body of a task; format_results, its output, and parse_results, the
        reverse; check_two_nodes, which has Slurm run the task on two machines
Raises  ConfigError for each fault, with its fix

    first                                    second
    0.json, `page` with "old"  ---------->   reads them, and checks that `late` is absent
    <------------------------------------    connects, and asks for the time
    the time; a new `page`, `late`, a lock   waits until it sees both, tries the lock

Separate from doctor.py, which checks one machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import msgspec

from laminar.cluster.job_scripts import JobScripts
from laminar.config import Config, ConfigError, dump_config
from laminar.names.version import __version__
from laminar.net.addresses import MACHINE, is_loopback, own_ip, own_name
from laminar.run.directory import CONFIG_FILE, run_config
from laminar.run.lock import try_lock
from laminar.run.renames import write_whole

SEEN_S = 60.0
"""Longest delay for a file to become visible; network file systems refresh within that time."""
CONNECT_S = 10.0
CLOCK_S = 1.0
MACHINES_S = 120  #: longest time for Slurm to find two machines; a full cluster has none
_POLL_S = 0.05
_LINE_MAX = 900
"""Characters per line. srun keeps lines of two tasks apart only up to 1,024 bytes."""
_LINE = re.compile(r"^\[([01])\](.*)$", re.MULTILINE)


class MachineFacts(msgspec.Struct, frozen=True):
    """Facts that one machine reports about itself."""

    name: str
    version: str
    machine: str
    host: str
    port: int
    torch: str  #: its version, which all ranks of a trainer share


class Found(msgspec.Struct, frozen=True):
    """Result of one check."""

    subject: str
    sound: bool
    text: str


Check = Callable[[], str]


def run_check(subject: str, check: Check) -> Found:
    try:
        return Found(subject, True, check())
    except ConfigError as error:
        return Found(subject, False, str(error))


def check_this_machine(directory: Path, rank: int) -> list[Found]:
    """Run this machine's part, as the first or the second of the two."""
    name = own_name()
    if not directory.is_dir():
        return [
            Found(
                f"{name} directory",
                False,
                f"{name} does not see {directory.parent}: choose a run.output_dir on a file system "
                "that all machines share",
            )
        ]
    config = run_config(directory)
    try:
        with socket.create_server((own_ip(config.coordinator.host, "coordinator.host"), 0)) as own:
            return list(_check_pair(directory, rank, own))
    except ConfigError as error:
        return [Found(f"{name} address", False, str(error))]


def _check_pair(directory: Path, rank: int, own: socket.socket) -> Iterator[Found]:
    host, port = own.getsockname()
    facts = MachineFacts(own_name(), __version__, MACHINE, host, port, version("torch"))
    write_whole(directory / f"page.{rank}", b"old", durable=True)
    write_whole(directory / f"{rank}.json", msgspec.json.encode(facts), durable=True)
    seen = directory / f"{1 - rank}.json"
    found = run_check(f"{facts.name} directory", lambda: _check_seen(seen))
    yield found
    if not found.sound:
        return
    other = msgspec.json.decode(seen.read_bytes(), type=MachineFacts)
    yield run_check(f"{facts.name} program", lambda: _check_version(facts, other))
    link = _PeerLink(own, facts, other)
    found = run_check(f"{facts.name} address", lambda: link.open(first=rank == 0))
    yield found
    if found.sound:
        with contextlib.closing(link):
            yield from (
                _run_first(directory, link) if rank == 0 else _run_second(directory, link, other)
            )


def _check_seen(path: Path) -> str:
    directory = path.parent.parent
    _wait(
        path.exists,
        f"files that the other machine writes into {directory} do not appear here within "
        f"{SEEN_S:g} s: choose a run.output_dir on a file system that all machines share, or mount "
        "it with a shorter cache time (NFS: actimeo)",
    )
    return f"{directory} is shared"


def _wait(until: Callable[[], bool], otherwise: str) -> float:
    """Return the seconds until the other machine's change is visible; ConfigError after SEEN_S."""
    begun = time.monotonic()
    while not until():
        if time.monotonic() - begun > SEEN_S:
            raise ConfigError(otherwise)
        time.sleep(_POLL_S)
    return time.monotonic() - begun


def _check_version(own: MachineFacts, other: MachineFacts) -> str:
    if own.version != other.version:
        raise ConfigError(
            f"laminar is {own.version} here and {other.version} on {other.name}: install one where "
            "all machines see it, and name it in slurm.setup"
        )
    if own.torch != other.torch:
        raise ConfigError(
            f"torch is {own.torch} here and {other.torch} on {other.name}: the ranks of a trainer "
            "need the same, so install one environment where all machines see it"
        )
    return f"laminar {own.version}, torch {own.torch}"


class _PeerLink:
    """Text line between the two machines, each of which the other has reached."""

    def __init__(self, own: socket.socket, facts: MachineFacts, other: MachineFacts) -> None:
        self._own, self._facts, self._other = own, facts, other
        self._lines: TextIO | None = None

    def open(self, *, first: bool) -> str:
        if self._other.machine != MACHINE and is_loopback(f"tcp://{self._other.host}:0"):
            raise ConfigError(
                f"the name of {self._other.name} is {self._other.host}, which other machines "
                "cannot reach: set coordinator.host to the interface of its network, such as 'ib0'"
            )
        self._own.settimeout(CONNECT_S)
        try:
            probe, line = self._connect_peer(first)
        except OSError as error:
            raise ConfigError(
                f"{self._other.name} ({self._other.host}) and {self._facts.name} "
                f"({self._facts.host}) do not reach each other ({error}): set coordinator.host to "
                "the interface of a network without a firewall between them"
            ) from None
        probe.close()
        line.settimeout(2 * SEEN_S)
        self._lines = line.makefile("rw", encoding="utf-8")
        line.close()
        return f"{self._other.name} is reached at {self._other.host}"

    def _connect_peer(self, first: bool) -> tuple[socket.socket, socket.socket]:
        """Open one connection each way; the one opened by the second is the text line."""
        where = (self._other.host, self._other.port)
        if first:
            line, _ = self._own.accept()
            return socket.create_connection(where, CONNECT_S), line
        line = socket.create_connection(where, CONNECT_S)
        probe, _ = self._own.accept()
        return probe, line

    def send_word(self, word: str) -> None:
        assert self._lines is not None
        self._lines.write(f"{word}\n")
        self._lines.flush()

    def read_word(self) -> str:
        assert self._lines is not None
        return self._lines.readline().strip()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _run_first(directory: Path, link: _PeerLink) -> Iterator[Found]:
    """Send the time, then change what the second checks."""
    link.read_word()
    link.send_word(str(time.time()))
    link.read_word()  # the second has read the page, and checked that `late` is absent
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        held = try_lock(lock, fcntl.LOCK_EX)
        write_whole(directory / "page.0", b"new", durable=True)
        write_whole(directory / "late", b"", durable=True)
        link.send_word("changed" if held else "no lock")
        link.read_word()  # the second has tried the lock
    finally:
        os.close(lock)
    yield from ()


def _run_second(directory: Path, link: _PeerLink, other: MachineFacts) -> Iterator[Found]:
    name = own_name()
    asked = time.time()
    link.send_word("time?")
    offset = float(link.read_word()) - (asked + time.time()) / 2
    yield run_check(f"{name} clock", lambda: _check_clock(offset, other))
    (directory / "page.0").read_bytes()
    (directory / "late").exists()
    link.send_word("looked")
    link.read_word()
    yield run_check(f"{name} renames", lambda: _check_renames(directory))
    yield run_check(f"{name} locks", lambda: _check_locks(directory / "lock", other))
    link.send_word("done")


def _check_clock(offset_s: float, other: MachineFacts) -> str:
    if abs(offset_s) > CLOCK_S:
        raise ConfigError(
            f"the clock of {other.name} differs from this one by {offset_s:+.1f} s: synchronize "
            "both by NTP, or times in logs and figures will not agree"
        )
    return f"{offset_s * 1e3:+.1f} ms"


def _check_renames(directory: Path) -> str:
    page, late = directory / "page.0", directory / "late"
    took = _wait(
        lambda: page.read_bytes() == b"new" and late.exists(),
        f"a file in {directory.parent} that the other machine has replaced does not appear here "
        f"within {SEEN_S:g} s: mount it with a shorter cache time (NFS: actimeo, "
        "lookupcache=positive), or choose another run.output_dir",
    )
    return f"seen after {took:.1f} s"


def _check_locks(path: Path, other: MachineFacts) -> str:
    """Check that a lock of the other machine is seen here, too."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        free = try_lock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"{path.parent.parent} has no file locks ({error.strerror}); {_MEND}"
        ) from None
    finally:
        os.close(fd)
    if free:
        raise ConfigError(
            f"a file in {path.parent.parent} that {other.name} has locked can be locked here too, "
            f"so two machines could resume one run at a time; {_MEND}"
        )
    return "seen by both machines"


_MEND = (
    "mount it with locks for all machines (NFS: without nolock and local_lock; Lustre: flock), or "
    "choose another run.output_dir"
)


def format_results(rank: int, found: list[Found]) -> Iterator[str]:
    """Yield the lines in which a task prints its results."""
    text = json.dumps(msgspec.to_builtins(found))
    for begin in range(0, len(text), _LINE_MAX):
        yield f"[{rank}]{text[begin : begin + _LINE_MAX]}"


def parse_results(output: str) -> list[list[Found]]:
    """Return the results of each task that printed all of them, in order."""
    parts = ["", ""]
    for rank, part in _LINE.findall(output):
        parts[int(rank)] += part
    answers = []
    for text in filter(None, parts):
        with contextlib.suppress(msgspec.DecodeError):
            answers.append(msgspec.json.decode(text, type=list[Found]))
    return answers


def check_two_nodes(config: Config, scripts: JobScripts) -> list[Found]:
    """Have Slurm run both parts; raise ConfigError if that fails."""
    above = next(path for path in scripts.run_dir.parents if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".laminar-doctor-", dir=above) as made:
        (Path(made) / CONFIG_FILE).write_text(dump_config(config))
        body = f"exec {scripts.program} doctor --pair {shlex.quote(made)}"
        setup = config.slurm.setup.strip()
        command = ["srun", *_list_options(config), "bash", "-c", "\n".join([setup, body]).strip()]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=MACHINES_S + 4 * SEEN_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"no answer from two machines: {error}; try again") from None
    answers = parse_results(done.stdout)
    found = [each for answer in answers for each in answer]
    if len(answers) < 2 and all(each.sound for each in found):
        words = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(
            f"two machines did not answer ({words[0] if words else 'srun gives no reason'}): try "
            f"again when two are free, or check that {scripts.program} starts on them"
        )
    return found


def _list_options(config: Config) -> Iterator[str]:
    """Yield options for two machines for some minutes; a failure of one ends both."""
    slurm = config.slurm
    yield from ("--nodes=2", "--ntasks=2", "--time=3", f"--immediate={MACHINES_S}", "--quiet")
    yield "--kill-on-bad-exit=1"
    yield from ([f"--partition={slurm.partition}"] if slurm.partition else [])
    yield from ([f"--account={slurm.account}"] if slurm.account else [])
    yield from ([f"--gpus-per-node={slurm.gpus}"] if slurm.gpus else [])
    yield from ([f"--mem={slurm.mem}"] if slurm.mem else [])
    yield from slurm.extra
