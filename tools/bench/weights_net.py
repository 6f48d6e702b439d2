"""One network card per machine, emulated on the loopback device of a private namespace.

Gives   namespace, open_network, limit, slower_card, without_cards, host; NetError with one sentence
        for a user

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
CONGESTION = "reno"
"""On loopback bbr takes about twice the processor time of reno and cubic, which are equal there."""
_CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_OTHERS = 99  #: class of what has no class of its own
_TO_SLOWER = 98


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


def limit(machines: int, rate_mbit: int = UNLIMITED_MBIT, burst_bytes: int = 1 << 20) -> None:
    """What each card sends per second, and at once after a pause."""
    for machine in range(machines):
        _change(machine + 1, rate_mbit, burst_bytes)


@contextlib.contextmanager
def slower_card(machine: int, rate_mbit: int, burst_bytes: int) -> Iterator[None]:
    """Meanwhile one card sends at this rate and takes at it, too; afterwards it takes at any.

    What is sent to it goes through a class of its own in the place of the sender's. Packets without
    data, by which TCP says what has come, pass all cards: they would wait behind what a slow card
    sends or takes, and hold the other direction up.
    """
    _change(machine + 1, rate_mbit, burst_bytes)
    _tc(f"class add dev lo parent 1: classid 1:{_TO_SLOWER} htb {_rate(rate_mbit, burst_bytes)}")
    short = "match ip protocol 6 0xff match u16 0x0020 0xffe0 at 2"
    _first(1, f"{short} flowid 1:{_OTHERS}")
    _first(2, f"match ip dst {host(machine)} flowid 1:{_TO_SLOWER}")
    try:
        yield
    finally:
        for order in (1, 2):
            _tc(f"filter del dev lo parent 1: protocol ip prio {order}")
        _tc(f"class del dev lo parent 1: classid 1:{_TO_SLOWER}")


def _first(order: int, what: str) -> None:
    """A filter ahead of those of the cards."""
    _tc(f"filter add dev lo parent 1: protocol ip prio {order} u32 {what}")


def _change(number: int, rate_mbit: int, burst_bytes: int) -> None:
    _tc(f"class change dev lo parent 1: classid 1:{number} htb {_rate(rate_mbit, burst_bytes)}")


def _rate(mbit: int, burst_bytes: int) -> str:
    burst = f"burst {burst_bytes} cburst {burst_bytes}"
    return f"rate {mbit}mbit ceil {mbit}mbit {burst} quantum 200000"


def _tc(arguments: str) -> None:
    _run("tc", *arguments.split())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetError(f"{' '.join(command)}: {done.stderr.strip()}")
