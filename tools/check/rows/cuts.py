"""Row 15: machines of a run are cut off, in network namespaces; each cut costs only its share.

Reads   nothing
Gives   ROWS; to run a number of rounds: python -m tools.check.rows.cuts ROUNDS   (as root, Linux)

Machine 0 runs the coordinator, the store and the trainer. Cutting it off affects most machines, so
no process is declared lost; cutting off another machine for longer than a lease restarts its relay
and replicas once. No trajectory is quarantined, and no restart counts towards
recovery.max_restarts. Engines, trainer, prompts and rewards are emulated.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laminar.analysis.log.run_log import WallClock, parse_command, parse_event, read_records
from laminar.eventlog.record import DecisionRecord, EventRecord
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.reasons import DropReason
from laminar.names import exit_codes, ids
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.network import Network
from tools.kit.real_run import BadRun, check, read_json

ROUNDS: dict[Gate, int] = {"pr": 1, "release": 5}
MACHINES = 3
SETTINGS = (
    "run.nodes=3", "run.name=cuts", "data.dataset_size=100000", "data.val_size=0",
    "data.train_batch_size=8", "data.max_response_length=1024", "rollout.engine=emulated",
    "rollout.replicas=2", "rollout.group_size=4", "rollout.max_num_seqs=16",
    "emulation.replicas_per_process=1", "emulation.median_response=200",
    "emulation.train_s=1.0", "emulation.weights_mb=8", "trainer.save_freq=5",
    "trainer.total_training_steps=100000",
)  # fmt: skip
CUT_S = 8.0
FLAP_S, FLAPS = 2.0, 5
SETTLE_S = 25.0  #: wait after a cut, in which lost processes return and ZeroMQ and TCP reconnect
FAULTS = (
    ("cut", 1), ("cut", 2), ("cut", 0), ("one-way", 1), ("one-way", 0), ("flapping", 2),
)  # fmt: skip
POLL_S, WAIT_S = 0.2, 120.0


class Cut(NamedTuple):
    """A fault of the network."""

    way: str  #: "cut", "one-way" or "flapping"
    machine: int
    from_ns: int  #: unix time


class Run:
    """A training run on these machines."""

    def __init__(self, network: Network, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output = run_dir.parent / "output"
        place = (f"run.output_dir={run_dir.parent}", f"run.name={run_dir.name}")
        host = f"coordinator.host={network.address(0)}"
        words = ("train", "--prepare", *SETTINGS, host, *place)
        self._parts = [network.start(0, self.output, *words)]
        if self._parts[0].wait(WAIT_S):
            raise BadRun(self.said())
        more = [("--node", str(machine)) for machine in range(1, MACHINES)]
        self._parts = [
            network.start(machine, self.output, "serve", str(run_dir), *words)
            for machine, words in enumerate([(), *more])
        ]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self._parts[0].poll() is not None or time.monotonic() > deadline:
                raise BadRun(f"timed out or ended before {what}: {self.said()}")
            time.sleep(POLL_S)

    def step(self) -> int:
        return int(read_json(self.run_dir / "status.json").get("step", -1))

    def whole(self) -> bool:
        """Return whether all machines have joined the run."""
        found = read_json(self.run_dir / "status.json").get("processes", {})
        return sum(name.startswith(("node-", "rollout-", "relay-")) for name in found) == 12

    def end(self) -> None:
        """Stop the run gracefully after one more step."""
        before = self.step()
        self.until(lambda: self.step() > before, "one more step is done")
        self._parts[0].send_signal(signal.SIGTERM)
        if code := self._parts[0].wait(WAIT_S):
            raise BadRun(f"exit code {code}: {self.said()}")

    def close(self) -> None:
        for part in self._parts:
            if part.poll() is None:
                part.send_signal(signal.SIGTERM)
        for part in self._parts:
            try:
                part.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                part.kill()

    def said(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])


def cut(rounds: int) -> Figure:
    with tempfile.TemporaryDirectory() as directory:
        try:
            cuts, started = cut_machines(Path(directory) / "run", rounds)
        except BadRun as error:
            return Figure(f"{rounds} rounds not completed", False, str(error))
    return Figure(
        f"{cuts} cuts; {started} processes of cut-off machines restarted, each once, 0 others; "
        "0 trajectories quarantined, 0 restarts counted; books agree, log replays",
        True,
    )


def cut_machines(run_dir: Path, rounds: int) -> tuple[int, int]:
    """Inject all faults; return their number and the number of processes restarted for them.

    Raise BadRun if a fault costs more than its share.
    """
    cuts: list[Cut] = []
    with Network(MACHINES) as network:
        training = Run(network, run_dir)
        try:
            training.until(training.whole, "all machines take part")
            training.until(lambda: training.step() >= 1, "a step is done")
            for way, machine in FAULTS * rounds:
                before = training.step()
                cuts.append(Cut(way, machine, time.time_ns()))
                _strike(network, way, machine)
                time.sleep(SETTLE_S)
                training.until(lambda: training.step() > before, f"a step after {way}")  # noqa: B023
            training.end()
        finally:
            training.close()
    check(run_dir)
    return len(cuts), count_restarts(run_dir, cuts)


def _strike(network: Network, way: str, machine: int) -> None:
    change = network.mute if way == "one-way" else network.cut
    times, duration_s = (FLAPS, FLAP_S) if way == "flapping" else (1, CUT_S)
    for _ in range(times):
        change(machine, cut=True)
        time.sleep(duration_s)
        change(machine, cut=False)
        if times > 1:
            time.sleep(duration_s)


def count_restarts(run_dir: Path, cuts: Sequence[Cut]) -> int:
    """Return how many processes were restarted for the cuts; raise BadRun if one cost more."""
    history = list(_history(run_dir))
    ends_ns = [cut.from_ns for cut in cuts[1:]] + [time.time_ns()]
    total = 0
    for cut, end_ns in zip(cuts, ends_ns, strict=True):
        known = set(_joined(history, 0, cut.from_ns))
        joined = _joined(history, cut.from_ns, end_ns)
        started = Counter(name for boot_id, name in joined.items() if boot_id not in known)
        if wrong := [name for name, times in started.items() if times > 1 or not _may(cut, name)]:
            raise BadRun(f"{', '.join(wrong)} restarted wrongly or too often for {cut}: {started}")
        total += sum(started.values())
    exits = [event for _, event in history if isinstance(event, ev.ProcessExited)]
    excused = {command.boot_id for command in _commands(run_dir, cmd.RestartActor)
               if command.cut_off}  # fmt: skip
    counted = [
        e.actor for e in exits
        if e.restarting and e.code != exit_codes.FENCED and e.boot_id not in excused
    ]  # fmt: skip
    quarantined = sum(
        ending.reason == DropReason.QUARANTINED
        for command in _commands(run_dir, cmd.EndTrajectories)
        for ending in command.endings
    )
    if counted or quarantined:
        raise BadRun(f"count towards max_restarts: {counted}; quarantined: {quarantined}")
    return total


def _joined(history: Sequence[tuple[int, Event]], from_ns: int, end_ns: int) -> dict[str, str]:
    """Return the names of the processes that joined in this period, by boot id."""
    return {
        event.boot_id: event.name
        for at_ns, event in history
        if isinstance(event, ev.ActorJoined) and from_ns <= at_ns < end_ns
    }


def _may(cut: Cut, name: str) -> bool:
    """Return whether the cut may restart this process: the machine's relay or a replica."""
    relay = ids.actor_name("relay", f"node-{cut.machine}", 0)
    replicas = [ids.actor_name("rollout", f"node-{cut.machine}", index) for index in range(2)]
    return cut.machine != 0 and cut.way != "flapping" and name in (relay, *replicas)


def _history(run_dir: Path) -> Iterator[tuple[int, Event]]:
    clock = WallClock()
    for record in read_records(run_dir):
        if isinstance(record, EventRecord):
            stamped = parse_event(record)
            yield clock.unix_ns(stamped), stamped.event


def _commands(run_dir: Path, kind: type[Any]) -> Iterator[Any]:
    for record in read_records(run_dir):
        if isinstance(record, DecisionRecord):
            command = parse_command(record)
            if isinstance(command, kind):
                yield command


def run(gate: Gate) -> Figure:
    return cut(ROUNDS[gate])


ROWS = (
    Row(
        15,
        "cutting off a machine costs only its share",
        "6: each machine, one way, flapping",
        "30, 0 lost, 0 double",
        run,
    ),
)

if __name__ == "__main__":
    figure = cut(int(sys.argv[1]))
    print(figure.reached, figure.detail, sep="\n")
    sys.exit(not figure.passed)
