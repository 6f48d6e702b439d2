"""Addresses of this machine: the address a server binds for a setting, and who can reach it.

Reads   the machine's interfaces, names and routes; its boot id
Gives   own_ip, ip_of, route_to, is_loopback, check_reachable, MACHINE
Raises  ConfigError with one sentence for a user

Addresses are IPv4; a name or interface that only has IPv6 is rejected.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import psutil

from laminar.config import ConfigError

MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
"""The kernel's boot id; processes with the same id can share loopback addresses."""
AUTO = "auto"
"""A host setting that stands for this machine's name, if the machine is not known in advance."""
LOOPBACK, LOCALHOST = "lo", "127.0.0.1"


def own_ip(host: str, key: str) -> str:
    """Resolve `host` (address, name or interface) to an IPv4 address of this machine.

    `key`: the setting or option that a ConfigError names.
    """
    ip = ip_of(host, key)
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            raise ConfigError(
                f"{key} = {host!r} is not an address, name or interface of this machine"
            ) from None
    return ip


def ip_of(host: str, key: str) -> str:
    """Resolve `host` to an IPv4 address, which may be another machine's; see own_ip."""
    name = own_name() if host == AUTO else host
    ip = _parse_address(name) or _of_interface(name) or _of_name(name)
    if ip is None and _has_ipv6(name):
        raise ConfigError(
            f"{key} = {host!r} has only an IPv6 address, but the processes of a run listen on "
            "IPv4: give an IPv4 address of that machine, or a name or interface that has one"
        )
    if ip is None:
        raise ConfigError(f"{key} = {host!r} is not a known address, name or interface")
    if ipaddress.IPv4Address(ip).is_unspecified:
        raise ConfigError(
            f"{key} = {host!r} would listen on all interfaces: give the address, name or "
            "interface by which the other machines reach this one"
        )
    return ip


def route_to(address: str) -> str:
    """Return the local address that routes to tcp://HOST:PORT, without sending anything."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise ConfigError(
                f"no route from here to the coordinator at {address} ({error.strerror}): "
                "set coordinator.host to an address that this machine reaches, or --host"
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with this address; "lo" for all of loopback."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return str(name)
    return LOOPBACK


def own_name() -> str:
    """Return this machine's name as other machines know it.

    In a Slurm job that is Slurm's node name, which may differ from the host name.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_reachable(ip: str, coordinator: str) -> None:
    """Raise ConfigError if servers listen on loopback but the run's coordinator does not.

    Other machines could then reach the coordinator, but not this node's relay and store; they know
    a relay by its address only.
    """
    if ip.startswith("127.") and not is_loopback(coordinator):
        raise ConfigError(
            f"the servers of this node listen on {ip}, a loopback address, but the coordinator on "
            f"{coordinator}: give --host an address, name or interface that the other machines "
            "reach, or omit it"
        )


def is_loopback(address: str) -> bool:
    """Return whether tcp://HOST:PORT can only be reached from its own machine."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return (_parse_address(host) or "").startswith("127.")


def _parse_address(host: str) -> str | None:
    try:
        return str(ipaddress.IPv4Address("0.0.0.0" if host == "*" else host))
    except ValueError:
        return None


def _of_interface(name: str) -> str | None:
    found = psutil.net_if_addrs().get(name, [])
    return next((each.address for each in found if each.family == socket.AF_INET), None)


def _of_name(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return None


def _has_ipv6(host: str) -> bool:
    """Return whether a host that has no IPv4 address is an IPv6 address, name or interface."""
    of_interfaces = psutil.net_if_addrs().get(host, [])
    if any(each.family == socket.AF_INET6 for each in of_interfaces):
        return True
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return bool(socket.getaddrinfo(bare, None, socket.AF_INET6))
    except (OSError, UnicodeError):
        return False
