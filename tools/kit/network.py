"""Machines of a run as network namespaces on a bridge, to cut one off; as root, on Linux.

Gives   Network; MachinesRun, a run on its machines
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path

from tools.kit.real_run import ROOT, WAIT_S, BadRun, Run, laminar, read_json


class Network:
    """Network namespaces on a bridge, each with one address."""

    def __init__(self, machines: int) -> None:
        self.machines = range(machines)
        self._bridge = f"lmc{secrets.token_hex(3)}"  # the links of a former one go late
        self._subnet = f"10.77.{os.getpid() % 250}"

    def __enter__(self) -> Network:
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("link", "set", self._bridge, "up")
        for machine in self.machines:
            name, outer, inner = self.name(machine), self.outer(machine), f"in{machine}"
            self._ip("netns", "add", name)
            self._ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            self._ip("link", "set", outer, "master", self._bridge, "up")
            self._ip("-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", inner)
            self._ip("-n", name, "link", "set", inner, "up")
            self._ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
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
        others = [self.address(other) for other in self.machines if other != machine]
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


class MachinesRun(Run):
    """A run with a machine in each namespace; machine 0 has coordinator, store and trainer."""

    def __init__(self, network: Network, run_dir: Path, *options: str) -> None:
        self.run_dir, self.output = run_dir, run_dir.parent / f"{run_dir.name}.output"
        place = (f"run.output_dir={run_dir.parent}", f"run.name={run_dir.name}")
        network_settings = (
            f"coordinator.host={network.address(0)}",
            f"run.nodes={len(network.machines)}",
        )
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        words = ("train", "--prepare", *options, *network_settings, *place)
        if network.start(0, self.output, *words).wait(WAIT_S):
            raise BadRun(self.said())
        more = [("--node", str(machine)) for machine in network.machines[1:]]
        self._parts = [
            network.start(machine, self.output, "serve", str(run_dir), *words)
            for machine, words in enumerate([(), *more])
        ]
        self.train = self._parts[0]

    def has_processes(self, count: int) -> bool:
        """Return whether so many nodes, relays and replicas have joined the run."""
        found = read_json(self.run_dir / "status.json").get("processes", {})
        return sum(name.startswith(("node-", "rollout-", "relay-")) for name in found) == count

    def close(self) -> None:
        for part in self._parts:
            if part.poll() is None:
                part.send_signal(signal.SIGTERM)
        for part in self._parts:
            try:
                part.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                part.kill()
