"""One network card per machine, emulated on the loopback device of a private namespace.

Gives   namespace, open_network, limit, without_cards, host; NetError with one sentence for a user

Over plain loopback all ways to broadcast cost the same, because they are all bound by the
processors; what separates them is that a machine has one card. So every machine is an address
127.0.0.N, and what an address sends goes through a traffic class of its own. Nothing outside the
namespace is touched.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

UNLIMITED_MBIT = 100_000
BURST_BYTES = 1 << 20  #: what a card sends at once after a pause
CONGESTION = "reno"
"""On loopback bbr takes about twice the processor time of reno and cubic, which are equal there."""
_CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_OTHERS = 99  #: class of what has no class of its own


class NetError(RuntimeError):
    """There is no emulated network here."""


def host(machine: int) -> str:
    """Address of a machine, numbered from 0."""
    return f"127.0.0.{machine + 1}"


def namespace() -> list[str] | None:
    """The command that gives a network of one's own, as root or as another user; None: neither."""
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return None
    attempt = ["sh", "-c", "ip link set lo up && tc qdisc add dev lo root handle 1: htb"]
    for prefix in (["unshare", "-n"], ["unshare", "-rn"]):
        if subprocess.run([*prefix, *attempt], capture_output=True).returncode == 0:
            return prefix
    return None


def open_network(machines: int) -> None:
    """In a namespace of our own: loopback, with a class for each machine, unlimited at first.

    NetError if something is in the way.
    """
    _run("ip", "link", "set", "lo", "up")
    try:
        _CONGESTION_FILE.write_text(CONGESTION)
    except OSError as error:
        raise NetError(f"{_CONGESTION_FILE} cannot be set to {CONGESTION}: {error}") from None
    _make_cards(machines)


@contextlib.contextmanager
def without_cards(machines: int) -> Iterator[None]:
    """Plain loopback meanwhile: also a card without a limit takes processor time, for each packet.

    Afterwards the cards are there again, without limits.
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
    """What each card sends per second."""
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
