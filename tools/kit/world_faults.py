"""Losses and returns of processes of the test world, by chance or at a given time.

Reads   Faults, the rates and times
Gives   FaultyProcesses, a base of World
"""

from __future__ import annotations

import random

from laminar.events import events as ev
from tools.kit.world_parts import (
    LOSSES,
    SILENCE_S,
    Die,
    Faults,
    Kill,
    Lose,
    Process,
    Replace,
    Row,
    Silence,
    Start,
    Wake,
)


class FaultyProcesses:
    """Deaths, silences and replacements; World adds the clock and `say`."""

    faults: Faults
    random: random.Random
    processes: dict[str, Process]
    rows: dict[str, Row]

    def _schedule_faults(self, process: Process) -> None:
        if process.role == self.faults.fatal_role:
            self.later(process, self.faults.fatal_at_s, Die())
        if process.role in ("rollout", "agent") and self.faults.lose_every_s:
            seconds = self.random.expovariate(1 / self.faults.lose_every_s)
            self.later(process, seconds, Lose(self.random.choice(LOSSES)))
        if process.role == "relay" and self.faults.lose_relay_every_s:
            seconds = self.random.expovariate(1 / self.faults.lose_relay_every_s)
            self.later(process, seconds, Lose(self.random.choice(LOSSES)))
        if process.role == "trainer" and process.boot < self.faults.trainer_losses:
            seconds = self.random.expovariate(1 / self.faults.lose_trainer_every_s)
            self.later(process, seconds, Lose(self.random.choice(LOSSES)))
        last = list(self.processes.values())[-1].node
        if process.node == last != "node-0" and self.faults.lose_machine_at_s and not process.boot:
            self.later(process, self.faults.lose_machine_at_s, Die())
        if process.name == "node-0" and self.faults.replace_machine_at_s and not process.boot:
            self.later(process, self.faults.replace_machine_at_s, Replace())
        if process.name == last != "node-0" and self.faults.silent_node_at_s:
            self.later(process, self.faults.silent_node_at_s, Silence())

    def _pause_node(self, node: Process) -> None:
        """Silence a node beyond its lease: it reports and starts nothing, but its actors speak."""
        node.silent = True
        incarnation = node.incarnation
        self.say_own(ev.NodeSilent(node=node.name, node_incarnation=incarnation, silent_ms=9_000))
        self.later(node, SILENCE_S, Wake())

    def _wake_node(self, node: Process) -> None:
        node.silent = False
        self.say_own(ev.NodeRecovered(node=node.name, node_incarnation=node.incarnation))
        waiting, node.waiting = node.waiting, []
        for item in waiting:
            self.later(node, 0, item)

    def _lose(self, process: Process, how: str) -> None:
        if how == "dies":
            self._kill(process)
        elif how == "falls silent":
            self._fall_silent(process)
        elif how == "is replaced":
            self._replace(process)
        elif how == "complains":
            self.say(process, ev.ActorFailed(reason="out of memory", user_error=False))
            self.later(process, 0.05, Kill())
        else:
            self.say(process, ev.ActorLeft())
            self._kill(process)

    def _kill(self, process: Process) -> None:
        """Kill the process; its node reports that and restarts it a little later."""
        if process.alive:
            dead = self._end_process(process)
            self._exited(process, dead, restarting=True)
            node = self.processes[process.node]
            self.later(node, self.random.uniform(0.1, self.faults.restart_s), Start(process.name))

    def _replace(self, process: Process) -> None:
        """Join a new process before the death of the old one is known."""
        dead = self._end_process(process)
        self._start(process)
        self._exited(process, dead, restarting=True)

    def _replace_machine(self, node: Process) -> None:
        """End a whole machine at once; sometimes its loss is noticed before the new node joins."""
        children = [p for p in self.processes.values() if p.node == node.name and p is not node]
        incarnation = node.incarnation
        for process in (node, *children):
            self._end_process(process)
        node.waiting.clear()
        if self.random.random() < 0.3:
            self.say_own(
                ev.HeartbeatLost(actor=node.name, actor_incarnation=incarnation, silent_ms=9_000)
            )
        node.silent = False
        self._start(node)
        for process in children:
            seconds = self.random.uniform(0.1, self.faults.restart_s)
            self.later(node, seconds, Start(process.name))

    def _end_process(self, process: Process) -> str:
        """End a process and return its boot id; the tokens that it flushed stay in the store."""
        dead = process.boot_id
        for trajectory, placement in process.work.items():
            row = self.rows[trajectory]
            if not row.generated and row.placement == placement:
                row.num_tokens = self.random.randint(row.num_tokens, 10 * row.turns + 9)
                row.version = process.version
        process.boot += 1
        process.alive, process.version, process.peer_seq = False, -1, 0
        process.work.clear()
        process.sessions.clear()
        process.gauge_due = False
        process.held.clear()
        process.batches, process.kept, process.rounding = [], [], ""
        process.pinned, process.unfinished, process.successor = -1, (), ""
        return dead

    def _exited(self, process: Process, dead: str, *, restarting: bool) -> None:
        exited = ev.ProcessExited(actor=process.name, boot_id=dead, code=-9, restarting=restarting)
        node = self.processes[process.node]
        if node.silent:
            node.waiting.append(exited)
        else:
            self.say(node, exited)

    def _die(self, process: Process) -> None:
        """End a process for good: its node reports that; a node itself falls silent."""
        process.alive = False
        if process.role == "node":
            self._fall_silent(process)
        else:
            self._exited(process, process.boot_id, restarting=False)

    def _fall_silent(self, process: Process) -> None:
        """Lose the process's link; it works on until its node has killed it."""
        lost = ev.HeartbeatLost(
            actor=process.name, actor_incarnation=process.incarnation, silent_ms=3_000
        )
        self.say_own(lost)

    def _start(self, process: Process) -> None:
        process.alive = True
        self.join(process)
        self._schedule_faults(process)
