"""status.json: a summary of the run, rewritten while the coordinator works.

Reads   the state after an event, or of a replay
Writes  RUN/status.json, at most every INTERVAL_S, by the telemetry thread
Gives   the same to the boards of `trainer.logger` that show it; StatusFigures for a replay

A file that is older than REFRESH_S is of a coordinator that does not work. For live progress, and
for people on a cluster without a terminal on the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.core.scheduling.admission import find_full_resource, find_not_admitted_reason
from laminar.core.scheduling.sessions import list_hosts
from laminar.core.state.evaluation_scores import describe_evaluation
from laminar.core.state.indexes import indexes_of, is_streaming
from laminar.core.state.members import Replica
from laminar.core.state.process_failures import ProcessFailures
from laminar.core.state.replica_index import Kind
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.core.state.transitions import IN_ENGINE
from laminar.core.waits import Wait, list_awaited_processes, list_waits
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.roles import Role
from laminar.observe.engine_gauges import LatestGauges, RepackCounts
from laminar.observe.telemetry import Outlet, Telemetry
from laminar.run.directory import STATUS_FILE
from laminar.run.renames import write_whole

INTERVAL_S = 0.4
"""Less than a replica's interval between two gauges, so that each of them is shown."""
REFRESH_S = 2.0
"""The longest time between two writes of a coordinator that makes turns but handles no event."""
WAITS_SHOWN = 64  #: the oldest waits that are shown; `waits_total` counts all
LEFT_OUT_SHOWN = 16  #: replicas and versions with rows left out that are shown; the log has all


def measure_status_age(run_dir: Path) -> float:
    """Return the seconds since the coordinator wrote its status; 0 if that is unknown."""
    try:
        return max(time.time() - (run_dir / STATUS_FILE).stat().st_mtime, 0.0)
    except OSError:
        return 0.0


class StatusFigures:
    """Observer of events that keeps the figures of a status that the state lacks."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.last_metrics: dict[str, float] = {}
        self._gauges, self._repack, self._losses = LatestGauges(), RepackCounts(), ProcessFailures()
        self.left_out: deque[str] = deque(maxlen=LEFT_OUT_SHOWN)

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self._gauges.record_event(stamped, state)
        self._repack.record_commands(commands, state)
        self._losses.record_event(stamped, commands)
        if metrics := getattr(stamped.event, "metrics", None):
            self.last_metrics = metrics
        if isinstance(stamped.event, ev.StepCompleted):
            self.left_out += map(format_left_out, stamped.event.left_out)

    def build_status(self, state: State, time_ns: int) -> dict[str, Any]:
        """Return the status at a time by the clock of the run."""
        trained = state.work.ledger.trajectories.trained
        failed = state.run.failed or state.run.drain_failure
        waits = list_waits(state)
        return {
            "seconds": time_ns / 1e9,
            "phase": state.run.phase,
            "pause": "pausing" if state.run.pausing else "paused" if state.run.paused else "",
            "event": state.seq,
            "step": state.steps.completed,
            "total_steps": state.settings.total_steps,
            "reward": self.last_metrics.get("reward/mean"),
            "tokens_per_s": self.tokens_per_s,
            "staleness_mean": state.steps.staleness_sum / trained if trained else 0.0,
            "staleness_max": state.steps.staleness_max,
            "newest_version": state.versions.newest,
            "groups_ready": len(state.work.ready),
            "trainer": _describe_trainer(state),
            "replicas": self._describe_replicas(state),
            "hosts": {name: _count_sessions(state, name) for name in list_hosts(state)},
            "evaluations": [describe_evaluation(result) for result in state.evaluations.results],
            "evaluating": state.evaluations.running is not None,
            "export": state.versions.export_path,
            "failure": failed.sentence if failed is not None else "",
            "reward_errors": reward_errors(state),
            "left_out": list(self.left_out),
            "warnings": list(state.signals.warnings.values()),
            "silent_nodes": [a.name for a in state.members.actors.values() if a.silent and a.alive],
            "awaited": list_awaited_processes(state),
            "waits": [_describe_wait(wait) for wait in waits[:WAITS_SHOWN]],
            "waits_total": len(waits),
            "lost_by": dict(self._losses.why),
            "repack": self._describe_repack(state),
            "processes": {a.name: a.pid for a in state.members.actors.values()},
        }

    def _describe_repack(self, state: State) -> dict[str, int] | None:
        """Return the counts of repack since this coordinator began; None without repack."""
        if not state.settings.repack_policy:
            return None
        return {"emptied": self._repack.emptied, "moves": self._repack.moves}

    def _describe_replicas(self, state: State) -> dict[str, dict[str, Any]]:
        """Return the activity of each replica and the last report of its engine.

        The admission rule is evaluated once per kind of replica, since there may be ten
        thousand.
        """
        doing: dict[Kind | None, str] = {}
        shown = {}
        index, full = indexes_of(state).replicas, _describe_full(state)
        group_size = state.settings.group_size  # capacity includes a group that waits
        for name, replica in state.members.replicas.items():
            kind = index.get_kind(name)
            if kind is None or kind not in doing:
                refused = find_not_admitted_reason(state, replica) or "admitting"
                begins = state.run.phase == Phase.STARTING
                doing[kind] = "pulling" if replica.loading else "starting" if begins else refused
            waiting = max(len(replica.running) - max(replica.capacity - group_size, 1), 0)
            shown[name] = {
                "version": replica.version,
                "running": len(replica.running) - waiting,
                "waiting": waiting,
                "doing": _describe_activity(state, replica, doing[kind], full),
                "engine": self._gauges.reports.get(name),
            }
        return shown


class StatusWriter:
    """Observer of the coordinator that writes its status."""

    def __init__(
        self,
        run_dir: Path,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
        boards: Sequence[Outlet[dict[str, Any]]] = (),
    ) -> None:
        self._path = run_dir / STATUS_FILE
        self._outlets = [telemetry.add_outlet("status", self._write_newest, kept=1), *boards]
        self._clock = clock
        self._written = 0.0
        self._tokens: tuple[float, int] = (clock(), 0)
        self.figures = StatusFigures()
        self._latest: tuple[float, int, State] | None = None  #: last event: clock, time and state

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self._clock()
        self.figures(stamped, commands, state)
        self._latest = now, stamped.time_ns, state
        metrics = getattr(stamped.event, "metrics", None)
        if now - self._written >= INTERVAL_S or state.run.phase == Phase.ENDED or metrics:
            self._write(now, stamped.time_ns, state)

    def refresh(self) -> None:
        """Write the status again if no event has caused that for some time."""
        now = self._clock()
        if self._latest is not None and now - self._written >= REFRESH_S:
            heard, time_ns, state = self._latest
            self._write(now, time_ns + int((now - heard) * 1e9), state)

    def _write(self, now: float, time_ns: int, state: State) -> None:
        """Write the status; `time_ns`: the time by the clock of the run."""
        self._written = now
        then, before = self._tokens
        total = sum(r.tokens_total for r in state.members.replicas.values())
        if now - then >= 2.0:
            self.figures.tokens_per_s = max(total - before, 0) / (now - then)
            self._tokens = (now, total)
        status = self.figures.build_status(state, time_ns)
        for outlet in self._outlets:
            outlet.put(status)

    def _write_newest(self, found: list[dict[str, Any]]) -> None:
        """Write the newest status; not durable, because the next one comes soon."""
        write_whole(self._path, msgspec.json.encode(found[-1]), durable=False)


def _describe_wait(wait: Wait) -> dict[str, Any]:
    """Return a wait with its times in seconds, as in "seconds"."""
    found = wait._asdict()
    found["since"] = found.pop("since_ns") / 1e9
    until_ns = found.pop("until_ns")
    return found | {"until": None if until_ns is None else until_ns / 1e9}


def _describe_activity(state: State, replica: Replica, doing: str, full: str) -> str:
    """Return the activity of one replica, given that of its kind.

    A replica may stream; `full`: what it does instead of admitting.
    """
    if is_streaming(state, replica.name):
        return "streaming"
    return full if full and doing == "admitting" else doing


def _describe_full(state: State) -> str:
    """Return the limit of sessions if it binds, which is the same for all replicas."""
    replica = next(iter(state.members.replicas.values()), None)
    if replica is None or not state.settings.has_environment:
        return ""
    full = find_full_resource(state, replica)
    return f"{full}-full" if full else ""


def _describe_trainer(state: State) -> str:
    """Return the trainer's activity; a new process repeats the steps after its checkpoint."""
    if any(
        state.members.actors[name].role == Role.TRAINER for name in list_awaited_processes(state)
    ):
        return "away"
    if 0 <= state.steps.repeated < state.steps.completed:
        return f"repeating step {state.steps.repeated + 1} of {state.steps.completed}"
    return "training" if state.steps.batch else "waiting"


def _count_sessions(state: State, host: str) -> dict[str, int]:
    """Count the sessions of a host, and those of them that a replica samples a turn for."""
    mine = [state.work.trajectories[name] for name in indexes_of(state).sessions.get(host, ())]
    return {"sessions": len(mine), "sampled": sum(t.status in IN_ENGINE for t in mine)}


def format_left_out(part: ev.ExcludedRows) -> str:
    """Describe which rows were not trained, and why."""
    return (
        f"{len(part.trajectories)} responses of {part.replica} with version {part.version} were "
        f"left out: its log-probs differ from the trainer's by {part.diff:.3g} per token, above "
        f"the {part.limit:.3g} possible for weights of that age"
    )


def reward_errors(state: State) -> dict[str, Any] | None:
    """Return counts of failed rewards and the first failure; None if there were none."""
    rewards = state.signals.rewards
    if rewards is None or not rewards.errors:
        return None
    return {"answers": rewards.answers, "by_reason": rewards.errors, "first": rewards.first}
