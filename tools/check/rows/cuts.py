"""Row 15: machines of a run are cut off, in network namespaces; each cut costs only its share.

Reads   nothing
Gives   ROWS   (as root, Linux)

Machine 0 runs the coordinator, the store and the trainer. Cutting it off affects most machines, so
no process is declared lost; cutting off another machine for longer than a lease restarts its relay
and replicas once. No trajectory is quarantined, and no restart counts towards
recovery.max_restarts. Engines, trainer, prompts and rewards are emulated.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.reasons import DropReason
from laminar.names import exit_codes, ids
from tools.bench.kills.lost_answers import read_log
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.network import MachinesRun, Network
from tools.kit.real_run import BadRun, check

ROUNDS: dict[Gate, int] = {"pr": 1, "release": 5}
MACHINES = 3
SETTINGS = (
    "data.dataset_size=100000", "data.val_size=0",
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
PROCESSES = 12  #: nodes, relays and replicas


class Cut(NamedTuple):
    """A fault of the network."""

    way: str  #: "cut", "one-way" or "flapping"
    machine: int
    from_ns: int  #: unix time


def run(gate: Gate) -> Figure:
    with tempfile.TemporaryDirectory() as directory:
        cuts, started = cut_machines(Path(directory) / "run", ROUNDS[gate])
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
    with Network(MACHINES) as network, MachinesRun(network, run_dir, *SETTINGS) as training:
        training.until(lambda: training.has_processes(PROCESSES), "all machines take part")
        training.until_step(1)
        for way, machine in FAULTS * rounds:
            before = training.step()
            cuts.append(Cut(way, machine, time.time_ns()))
            _strike(network, way, machine)
            time.sleep(SETTLE_S)
            training.until_step(before + 1)
        training.drain()
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
    log = read_log(run_dir)
    history = [(told.at_ns, told.event) for told in log.events]
    orders = [order for _, order in log.orders]
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
    excused = {o.boot_id for o in orders if isinstance(o, cmd.RestartActor) and o.cut_off}
    counted = [
        e.actor for e in exits
        if e.restarting and e.code != exit_codes.FENCED and e.boot_id not in excused
    ]  # fmt: skip
    quarantined = sum(
        ending.reason == DropReason.QUARANTINED
        for order in orders
        if isinstance(order, cmd.EndTrajectories)
        for ending in order.endings
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


ROWS = (
    Row(15, "cutting off a machine costs only its share", "6: each machine, one way, flapping",
        "30, 0 lost, 0 double", run),
)  # fmt: skip
