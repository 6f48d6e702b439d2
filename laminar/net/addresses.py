"""Addresses of this machine: what a server binds for what the user wrote, and who can reach it.

Reads   the machine's interfaces, names and routes; its boot id
Gives   own_ip, ip_of, route_to, is_loopback, MACHINE
Raises  ConfigError with one sentence for a user
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from laminar.config import ConfigError

MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
"""Processes with the same one have the same kernel, and can share its loopback addresses."""
AUTO = "auto"
"""A host that means this machine by its name, for a run that does not know yet where it will be."""
_SIOCGIFADDR = 0x8915


def own_ip(host: str, key: str) -> str:
    """The IPv4 address of this machine that `host`, an address, a name or an interface, means.

    `key`: the setting or option, for the sentence of a ConfigError.
    """
    ip = ip_of(host, key)
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            raise ConfigError(
                f"{key} = {host!r} is no address, name or interface of this machine"
            ) from None
    return ip


def ip_of(host: str, key: str) -> str:
    """The same, where the address may be another machine's."""
    name = own_name() if host == AUTO else host
    ip = _address_of(name) or _of_interface(name) or _of_name(name)
    if ip is None:
        raise ConfigError(f"{key} = {host!r} is no address, name or interface that is known here")
    if ipaddress.IPv4Address(ip).is_unspecified:
        raise ConfigError(
            f"{key} = {host!r} would listen on all interfaces: give the address, the name or the "
            "interface by which the other machines reach this one"
        )
    return ip


def route_to(address: str) -> str:
    """The address of this machine on the way to tcp://HOST:PORT; nothing is sent."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise ConfigError(
                f"there is no way from here to the coordinator at {address} ({error.strerror}): "
                "set coordinator.host to an address that this machine reaches, or --host"
            ) from None
        return str(probe.getsockname()[0])


def own_name() -> str:
    """This machine's name as the others know it: that of Slurm in a job, which may be another than
    its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_loopback(address: str) -> bool:
    """Whether tcp://HOST:PORT is reached from its own machine only."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return (_address_of(host) or "").startswith("127.")


def _address_of(host: str) -> str | None:
    try:
        return str(ipaddress.IPv4Address("0.0.0.0" if host == "*" else host))
    except ValueError:
        return None


def _of_interface(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _of_name(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return None
