"""Emulation of one network card per machine on the loopback device of a private namespace.

Gives   namespace, open_network, limit, without_cards, host; NetError with a message for a user

Over plain loopback all broadcast methods cost the same, because all are CPU-bound; they differ only
if a machine has one card. So every machine is an address 127.0.0.N, whose traffic goes through a
separate traffic class. Nothing outside the namespace changes.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

UNLIMITED_MBIT = 100_000
BURST_BYTES = 1 << 20  #: bytes that a card may send at once after a pause
CONGESTION = "reno"
"""Congestion control; on loopback bbr takes about twice the CPU time of reno or cubic."""
_CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_OTHERS = 99  #: default traffic class


class NetError(RuntimeError):
    """Failure to emulate the network."""


def host(machine: int) -> str:
    """Return the address of a machine, numbered from 0."""
    return f"127.0.0.{machine + 1}"


def namespace() -> list[str] | None:
    """Return the command that opens a private network, as root or as a user; None if neither."""
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return None
    attempt = ["sh", "-c", "ip link set lo up && tc qdisc add dev lo root handle 1: htb"]
    for prefix in (["unshare", "-n"], ["unshare", "-rn"]):
        if subprocess.run([*prefix, *attempt], capture_output=True).returncode == 0:
            return prefix
    return None


def open_network(machines: int) -> None:
    """Set up loopback in a private namespace, with an unlimited traffic class for each machine.

    Raise NetError if a command fails.
    """
    _run("ip", "link", "set", "lo", "up")
    try:
        _CONGESTION_FILE.write_text(CONGESTION)
    except OSError as error:
        raise NetError(f"{_CONGESTION_FILE} cannot be set to {CONGESTION}: {error}") from None
    _make_cards(machines)


@contextlib.contextmanager
def without_cards(machines: int) -> Iterator[None]:
    """Remove the cards within the block, because even an unlimited card costs CPU time per packet.

    Afterwards the cards are restored without limits.
    """
    _tc("qdisc del dev lo root")
    try:
        yield
    finally:
        _make_cards(machines)


def _make_cards(machines: int) -> None:
    _tc(f"qdisc add dev lo root handle 1: htb default {_OTHERS}")
    _tc(f"class add dev lo parent 1: classid 1:{_OTHERS} htb rate {UNLIMITED_MBIT}mbit")
    for machine in range(machines):
        _tc(f"class add dev lo parent 1: classid 1:{machine + 1} htb rate {UNLIMITED_MBIT}mbit")
        _tc(
            f"filter add dev lo parent 1: protocol ip u32 match ip src {host(machine)} "
            f"flowid 1:{machine + 1}"
        )


def limit(machines: int, rate_mbit: int = UNLIMITED_MBIT) -> None:
    """Limit the rate of each card."""
    burst = f"burst {BURST_BYTES} cburst {BURST_BYTES}"
    rate = f"rate {rate_mbit}mbit ceil {rate_mbit}mbit {burst} quantum 200000"
    for machine in range(machines):
        _tc(f"class change dev lo parent 1: classid 1:{machine + 1} htb {rate}")


def _tc(arguments: str) -> None:
    _run("tc", *arguments.split())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetError(f"{' '.join(command)}: {done.stderr.strip()}")
