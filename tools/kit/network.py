"""Machines of a run as network namespaces on a bridge, to cut one off; as root, on Linux.

Gives   Network
"""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

from tools.kit.real_run import ROOT, BadRun, laminar


class Network:
    """Network namespaces on a bridge, each with one address."""

    def __init__(self, machines: int) -> None:
        self._machines = range(machines)
        self._bridge = f"lmc{secrets.token_hex(3)}"  # the links of a former one go late
        self._subnet = f"10.77.{os.getpid() % 250}"

    def __enter__(self) -> Network:
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("link", "set", self._bridge, "up")
        for machine in self._machines:
            name, outer, inner = self.name(machine), self.outer(machine), f"in{machine}"
            self._ip("netns", "add", name)
            self._ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            self._ip("link", "set", outer, "master", self._bridge, "up")
            self._ip("-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", inner)
            self._ip("-n", name, "link", "set", inner, "up")
            self._ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            subprocess.run(["ip", "netns", "del", self.name(machine)], check=False)
        subprocess.run(["ip", "link", "del", self._bridge], check=False)

    def name(self, machine: int) -> str:
        return f"{self._bridge}-{machine}"

    def address(self, machine: int) -> str:
        return f"{self._subnet}.{machine + 1}"

    def cut(self, machine: int, *, cut: bool) -> None:
        """Cut off a machine in both directions, or reconnect it."""
        self._ip("link", "set", self.outer(machine), "down" if cut else "up")

    def mute(self, machine: int, *, cut: bool) -> None:
        """Drop everything that a machine sends, while it still receives; or undo that."""
        others = [self.address(other) for other in self._machines if other != machine]
        for other in others:
            order = "add" if cut else "del"
            self._ip("-n", self.name(machine), "route", order, "blackhole", f"{other}/32")

    def start(self, machine: int, output: Path, *words: str) -> subprocess.Popen[bytes]:
        """Start a `laminar` command on that machine."""
        with output.open("ab") as said:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name(machine), *laminar(*words)],
                cwd=ROOT,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def outer(self, machine: int) -> str:
        """Return the device that leads to a machine."""
        return f"{self._bridge}v{machine}"

    def _ip(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise BadRun(f"ip {' '.join(words)}: {done.stderr.strip()}")
