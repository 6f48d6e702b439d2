"""Row 23: the processes of a run refuse strangers, with a clear message and within seconds.

Reads   a run with real processes and connections, in which only engine and trainer are emulated
Gives   ROWS

Strangers connect to the coordinator, the store and the relay of a working run, which must continue
and end successfully. The message appears on the terminal of a stranger that is a Laminar process,
otherwise in the server's reply or log.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import psutil
import zmq

from laminar.net.auth import RunKeys
from laminar.net.transport import ClientSocket
from laminar.run.directory import CONFIG_FILE, COORDINATOR_FILE, LOGS_DIR, SECRET_FILE, run_config
from laminar.run.lock import holders
from laminar.run.secret import SECRET_BYTES, Secret, make_secret, read_secret
from laminar.weights.chain import wire
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.greetings import ended, greet, hello, received
from tools.kit.real_run import ROOT, BadRun, Run

CONFIG = "configs/emulated_256.toml"
SMALL = (
    "rollout.replicas=2",
    "data.dataset_size=2000",
    "data.val_size=0",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.max_response_length=200",
    "emulation.median_response=20",
    "emulation.step_us=2000",
    "emulation.train_s=0.3",
    "emulation.weights_mb=2",
    "trainer.total_training_steps=2000",  # stopped after the last stranger was refused
)
WITHIN_S = 5.0
GIVEN_UP_S = 30.0  #: timeout for a stranger that is not refused
POLL_S = 0.02
AGAIN_S = 0.5  #: wait per attempt of a client that may hang up before it is refused
ANOTHER_USER = 65534

NO_HANDLER = """
import sys
from laminar.net import auth
from laminar.net.auth import RunKeys
from laminar.net.transport import ServerSocket
from laminar.run.secret import read_secret
from pathlib import Path

class NoHandler:
    def admit_clients(self, domain, client):
        pass

auth._get_gate = NoHandler
server = ServerSocket("127.0.0.1", 0, RunKeys(read_secret(Path(sys.argv[1]))))
print(server.address, flush=True)
sys.stdin.read()
print(server.drain_frames(), flush=True)
"""
"""A server of the run without a ZAP handler; it prints the frames that it received: none."""
NOT_ITS_OWNER = """
import os
import sys
from laminar.cli import coord
own = os.geteuid()
os.geteuid = lambda: own + 1
sys.argv[0] = "laminar-coord"
coord.main()
"""
"""A coordinator that appears to run as another user, where this user cannot chown a file."""


class NotRefused(RuntimeError):
    """Failure to refuse a stranger: it was admitted, or got no message."""


class Refused(NamedTuple):
    """A stranger and the message that refused it."""

    who: str
    said: str
    seconds: float


class Place:
    """A working run, with directories for strangers next to it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.secret = run_dir, read_secret(run_dir)
        self.run = f"{run_config(run_dir).run.name}-{self.secret.run_id}"

    @cached_property
    def start_s(self) -> float:
        """Seconds that a daemon takes to start and print its help at the current load."""
        began = time.monotonic()
        command = [sys.executable, "-m", "laminar.cli.coord", "--help"]
        subprocess.run(command, capture_output=True, cwd=ROOT, timeout=GIVEN_UP_S, check=True)
        return time.monotonic() - began

    def address(self, server: str) -> str:
        return str(json.loads((self.run_dir / f"{server}.json").read_text())["address"])

    def bulk(self) -> tuple[str, int]:
        """Find the address of relay-0 for bulk transfers."""
        (pid,) = [each.pid for each in holders(self.run_dir) if each.name == "relay-0"]
        known = int(self.address("relay-0").rpartition(":")[2])
        found = [c.laddr for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
        ((host, port),) = [address for address in found if address[1] != known]
        return host, port

    def beside(self, name: str, mode: int = 0o600) -> Path:
        """Create a directory with the configuration of the run and a different secret."""
        other = self.run_dir.with_name(name)
        other.mkdir()
        shutil.copy(self.run_dir / CONFIG_FILE, other)
        make_secret(other)
        (other / SECRET_FILE).chmod(mode)
        return other


# --- strangers: each returns the message that refused it --------------------------------------


def plain_client(place: Place) -> str:
    """Connect to the coordinator with ZeroMQ but without a key; it logs the refusal.

    The end that first reads the other's mechanism hangs up. If that is the client, the server takes
    it for a process that died while connecting, not for a stranger. So this retries, which ZeroMQ
    does not do by itself.
    """
    log = place.run_dir / LOGS_DIR / "latest" / "coordinator.jsonl"

    def told_at_last() -> str | None:
        with zmq.Context.instance().socket(zmq.DEALER) as client:
            client.set(zmq.LINGER, 0)
            client.connect(place.address("coordinator"))
            client.send(b"hello")
            return _within(AGAIN_S, lambda: _logged(log, "peer-rejected"))

    return _until(told_at_last)


def unknown_key(place: Place) -> str:
    """Connect to the store with the server's public key but an unknown client key."""
    keys = RunKeys(Secret(secrets.token_bytes(SECRET_BYTES)))
    keys._server_public = RunKeys(place.secret)._server_public
    return _client_of(keys, place.address("store-0"))


def no_handler(place: Place) -> str:
    """Connect to a server without a ZAP handler, which must refuse even members of the run."""
    command = [sys.executable, "-c", NO_HANDLER, str(place.run_dir)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        said = _client_of(RunKeys(place.secret), server.stdout.readline().strip())
        came, _ = server.communicate("")
    if came != "[]\n":
        raise NotRefused(f"the server received {came}")
    return said


def secret_of_others(place: Place) -> str:
    """Start laminar-coord with a secret that others can read, then one that another user owns."""
    opened = _ended_by_mistake("laminar.cli.coord", place.beside("open", 0o644))
    if "is open to other users" not in opened:
        raise NotRefused(opened)
    directory = place.beside("foreign")
    if os.geteuid():
        return _ended_by_mistake("", directory)
    os.chown(directory / SECRET_FILE, ANOTHER_USER, ANOTHER_USER)
    return _ended_by_mistake("laminar.cli.coord", directory)


def replayed_greeting(place: Place) -> str:
    """Replay to the relay everything that a predecessor sent to it."""
    with socket.create_connection(place.bulk()) as sock:
        said = greet(sock, place.run, place.secret.derive_key("bulk"))
        if not isinstance(received(sock, wire.successor_decoder), wire.ChainWelcome):
            raise NotRefused("the relay did not accept the handshake to replay")
    with socket.create_connection(place.bulk()) as sock:
        sock.sendall(said)
        return ended(sock).decode(errors="replace")


def reflected_greeting(place: Place) -> str:
    """Send the relay's own proof back to it."""
    with socket.create_connection(place.bulk()) as sock:
        sock.sendall(wire.encode(hello(run=place.run)))
        challenge = received(sock, wire.successor_decoder)
        sock.sendall(wire.encode(wire.Proof(proof=challenge.proof)))
        return ended(sock).decode(errors="replace")


def other_run(place: Place) -> str:
    """Start a node of another run whose coordinator had the port before."""
    other = place.beside("other")
    shutil.copy(place.run_dir / COORDINATOR_FILE, other)
    words = [str(other), "--name", "node-1", "--roles", "relay", "--host", "127.0.0.2"]
    command = [sys.executable, "-m", "laminar.cli.node", *words]
    output = other / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT) as node,
    ):
        try:
            return _until(output.read_text)
        finally:
            node.terminate()


STRANGERS: dict[Callable[[Place], str], str] = {
    plain_client: "without the secret of this run",
    unknown_key: "refused the secret of this process",
    no_handler: "does not have the secret of this run",
    secret_of_others: "could change what this process runs as user",
    replayed_greeting: "relay-9 does not have the secret of run",
    reflected_greeting: "relay-9 does not have the secret of run",
    other_run: "does not have the secret of this run: it probably belongs to another run",
}
"""Strangers, each with a part of the message that it must get."""
STARTS = {secret_of_others: 2, other_run: 1}
"""Daemons that a stranger starts; their start time does not count as time to refuse."""


def refusal(stranger: Callable[[Place], str], place: Place) -> Refused:
    """Let a stranger try; return how it was refused, or raise NotRefused."""
    who = stranger.__name__.replace("_", " ")
    began = time.monotonic()
    try:
        said = stranger(place)
    except (NotRefused, OSError) as error:
        raise NotRefused(f"{who}: {error}") from error
    seconds = time.monotonic() - began - STARTS.get(stranger, 0) * place.start_s
    if STRANGERS[stranger] not in said:
        raise NotRefused(f"{who}: {said!r}")
    return Refused(who, said, seconds)


# --- observation ------------------------------------------------------------------------------


def _until(look: Callable[[], str | None]) -> str:
    """Wait until `look` returns a message; raise NotRefused after a timeout."""
    if said := _within(GIVEN_UP_S, look):
        return said
    raise NotRefused(f"no message within {GIVEN_UP_S:.0f} s")


def _within(seconds: float, look: Callable[[], str | None]) -> str | None:
    """Wait for a message from `look`; return None or "" after a timeout."""
    deadline = time.monotonic() + seconds
    while not (said := look()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return said


def _logged(file: Path, event: str) -> str:
    lines = [
        json.loads(line) for line in file.read_text().splitlines(keepends=True) if "\n" in line
    ]
    return next((str(line["what"]) for line in lines if line["event"] == event), "")


def _client_of(keys: RunKeys, address: str) -> str:
    client = ClientSocket(keys)
    try:
        client.connect(address)
        client.send(b"hello")
        return _until(client.find_refusal_reason)
    finally:
        client.close()


def _ended_by_mistake(module: str, run_dir: Path) -> str:
    """Run a daemon that must exit with code 2, NOT_ITS_OWNER if unnamed; return its message."""
    what = ["-m", module] if module else ["-c", NOT_ITS_OWNER]
    command = [sys.executable, *what, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=GIVEN_UP_S)
    if done.returncode != 2 or len(done.stderr.splitlines()) != 1:
        raise NotRefused(f"code {done.returncode}: {done.stdout}{done.stderr}")
    return done.stderr


# --- the row ----------------------------------------------------------------------------------


def run(gate: Gate) -> Figure:
    found: list[Refused] = []
    with tempfile.TemporaryDirectory() as directory:
        training = Run(Path(directory) / "run", CONFIG, SMALL)
        try:
            training.until_step(1)
            place = Place(training.run_dir)
            print(f"  a daemon starts in {place.start_s:.1f} s", flush=True)
            for stranger in STRANGERS:
                found.append(refusal(stranger, place))
            training.drain()
            if code := training.end():
                raise NotRefused(f"the run ended with code {code}: {training.said()}")
        except (NotRefused, BadRun) as error:
            return Figure(f"{len(found)} of {len(STRANGERS)} refused", False, str(error))
        finally:
            training.close()
    slowest = max(found, key=lambda each: each.seconds)
    reached = (
        f"{len(found)} of {len(STRANGERS)} refused with a message, after at most "
        f"{slowest.seconds:.1f} s ({slowest.who}); the run continued"
    )
    return Figure(reached, slowest.seconds <= WITHIN_S, "\n".join(map(str, found)))


ROWS = (
    Row(
        23,
        "strangers to a run are refused with a clear message within 5 s",
        "7 of 7 refused",
        "7 of 7 refused",
        run,
    ),
)
