"""Nodes started by `laminar train` and `laminar serve`, each restarted when it dies.

Reads   exit codes of the nodes
Starts  a laminar-node for each name of `names`, through `start`
Gives   NodeRestarter

A node's processes die with it; the new node restarts them, and the coordinator continues with them.
actors/restart_limit.py defines the number of restarts and the delays between them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from laminar.actors.restart_limit import RestartLimit, decide_node_restart
from laminar.config import Config

Process = subprocess.Popen[bytes]


@dataclass
class NodeProcess:
    """Node of one machine, with its restarts."""

    name: str
    process: Process
    limit: RestartLimit
    began_s: float
    again_s: float | None = None  #: time of its restart; None if it lives or is given up
    over: bool = False  #: not restarted any more


class NodeRestarter:
    """Restarter of the nodes of one run."""

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        start: Callable[[str], Process],
        note: Callable[[str], None],
    ) -> None:
        self._config, self._names = config, names
        self._start, self._note = start, note
        self._machines: list[NodeProcess] = []

    def start_all(self, first: Callable[[str], Process]) -> None:
        """Start all nodes; this first time through `first`."""
        for name in self._names:
            limit, now_s = RestartLimit(self._config), time.monotonic()
            self._machines.append(NodeProcess(name, first(name), limit, now_s))

    @property
    def begun(self) -> bool:
        return bool(self._machines)

    def get_exit_code(self) -> int | None:
        """Return the exit code of the first node, once none will be restarted."""
        over = all(machine.over for machine in self._machines)
        return self._machines[0].process.returncode if over else None

    def restart_ended(self, now_s: float) -> None:
        """Restart each ended node after its delay."""
        for machine in self._machines:
            if machine.again_s is not None and now_s >= machine.again_s:
                machine.process, machine.began_s = self._start(machine.name), now_s
                machine.again_s = None
            code = machine.process.poll()
            if code is not None and machine.again_s is None and not machine.over:
                self._plan_restart(machine, code, now_s)

    def _plan_restart(self, machine: NodeProcess, code: int, now_s: float) -> None:
        pause_s = decide_node_restart(machine.limit, code, now_s - machine.began_s, now_s)
        if pause_s is None or isinstance(pause_s, str):
            machine.over = True
            if pause_s:
                self._note(f"{machine.name} ended with exit code {code}; {pause_s}")
            return
        machine.again_s = now_s + pause_s
        self._note(
            f"{machine.name} ended with exit code {code}, and its processes with it; "
            + (f"restarting it in {pause_s:g} s" if pause_s else "restarting it")
        )

    def __iter__(self) -> Iterator[tuple[str, Process]]:
        """Iterate over all processes with their names, ended ones included."""
        return ((machine.name, machine.process) for machine in self._machines)
