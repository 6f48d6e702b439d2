"""Row 30: stuck processes are detected and named, and the run continues or ends.

Gives   ROWS; `stop_and_watch`, `was_named`, for tests of further wedges

Processes of a real run with emulated engines stand still (SIGSTOP). The table of waits in
status.json, and the event log, must name each within twice its deadline; then the run goes forward.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.codec import decode_event
from laminar.observe.status import measure_status_age
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.real_run import BadRun, Run, read_json

CONFIG = "configs/recipes/words/run.toml"
NODE_LEASE_S = 10.0
SETTINGS = (
    "rollout.engine=emulated",
    "rollout.replicas=2",
    "rollout.group_size=4",
    "rollout.max_num_seqs=16",
    "data.val_size=0",
    "data.max_prompt_length=32",
    "data.max_response_length=200",
    "data.train_batch_size=4",
    "trainer.total_training_steps=100000",
    "trainer.test_freq=0",
    "trainer.save_freq=5",
    "emulation.median_response=40",
    "emulation.train_s=0.5",
    f"coordinator.node_lease_ms={NODE_LEASE_S * 1000:.0f}",
)
DEADLINES_S = {
    "rollout-0": 5.0, "relay-0": 5.0, "store-0": NODE_LEASE_S, "trainer-0": NODE_LEASE_S,
    "coordinator": 30.0, "agent-0": 5.0,
}  # fmt: skip
WEDGES: dict[Gate, tuple[str, ...]] = {
    "pr": tuple(DEADLINES_S)[:4],
    "release": tuple(DEADLINES_S)[:5],
}
MARGIN_S = 10.0  #: for a machine that is busy with other work


def stop_and_watch(run: Run, name: str) -> float:
    """Stop a process; return the seconds until it is named and until the next step; BadRun."""
    pid = _pid_of(run, name)
    os.kill(pid, signal.SIGSTOP)
    began, limit_s = time.monotonic(), 2 * DEADLINES_S[name] + MARGIN_S
    run.until(lambda: _is_shown(run, name), f"the status names {name}")
    named_s = time.monotonic() - began
    if named_s > limit_s:
        raise BadRun(f"{name} was named after {named_s:.1f} s, which is more than {limit_s:.1f} s")
    run.until(lambda: _pid_of(run, name) not in (0, pid), f"{name} is back")
    if name != "coordinator" and not was_named(run.run_dir, name):
        raise BadRun(f"the event log does not name {name}")
    run.until_step(run.step() + 2)
    return named_s


def _pid_of(run: Run, name: str) -> int:
    if name == "coordinator":
        return int(read_json(run.run_dir / "coordinator.json").get("pid", 0))
    return int(read_json(run.run_dir / "status.json").get("processes", {}).get(name, 0))


def _is_shown(run: Run, name: str) -> bool:
    """Return whether a wait names the process; a coordinator shows by the age of its status."""
    if name == "coordinator":
        return measure_status_age(run.run_dir) >= DEADLINES_S["rollout-0"]
    waits: list[dict[str, Any]] = read_json(run.run_dir / "status.json").get("waits", [])
    return any(name in wait["what"] for wait in waits)


def read_events(run_dir: Path) -> Iterable[Event]:
    for _, record in read_log(RealDisk(run_dir / "events")):
        if isinstance(record, EventRecord):
            yield decode_event(record.event)


def was_named(run_dir: Path, name: str) -> bool:
    """Return whether the log says that this process was silent, or held the run up."""
    lost = (e.actor for e in read_events(run_dir) if isinstance(e, ev.HeartbeatLost))
    stalled = (e.owner for e in read_events(run_dir) if isinstance(e, ev.RunStalled))
    return name in {*lost, *stalled}


def watch_wedges(
    run_dir: Path,
    names: Iterable[str],
    note: Callable[[str], None],
    *,
    config: str = CONFIG,
    settings: Sequence[str] = SETTINGS,
) -> None:
    """Stop one process after the other in one run; BadRun."""
    run = Run(run_dir, config, settings)
    try:
        run.until_step(2)
        for name in names:
            note(f"{name} {stop_and_watch(run, name):.1f} s")
        if any(isinstance(e, ev.RunStalled) for e in read_events(run_dir)):
            raise BadRun("a run that moved was reported as stalled")
    finally:
        run.close()


def run(gate: Gate) -> Figure:
    found: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            watch_wedges(Path(directory) / "run", WEDGES[gate], found.append)
        except BadRun as error:
            return Figure(f"named: {', '.join(found) or 'none'}", False, str(error))
    return Figure(f"named after: {', '.join(found)}; each time the run continued", True)


ROWS = (
    Row(
        30,
        "stuck processes are detected and named",
        "4: replica, relay, store, trainer",
        "12 of 12, 0 false alarms",
        run,
    ),
)
