"""Progress display of `laminar train` and `laminar status`: a live panel on a terminal, else lines.

Reads   RUN/status.json; once, when the first step is done, the event log
Writes  the terminal, from a thread, so that a missing or blocked terminal delays nothing
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from laminar.analysis.log.evaluations import format_evaluation
from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.run_log import parse_event, read_records
from laminar.config import ConfigError
from laminar.core.state.statuses import Phase
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.observe.status import measure_status_age
from laminar.observe.telemetry import DRAIN_S, Outlet, PartlyWritten, Telemetry
from laminar.run.directory import read_status

PACE_STEPS = 20  #: number of recent steps from which the remaining time is estimated
LINE_MAX = 120  #: most characters of a plain line, for windows of this width
BAR = 20  #: characters of the progress bar
QUIET_S = 10.0  #: longest time between lines of a plain log without a new step
OLD_S = 10.0  #: age of a status from which it is marked: its coordinator does not work
WAITS_MAX = 12  #: waits in a panel; status.json has more

ORDINARY = ("training", "waiting")  #: activities of the trainer that are not mentioned

_START_PARTS: dict[type, str] = {
    ev.CoordinatorStarted: "checks",
    ev.ActorJoined: "processes",
    ev.TrainerReady: "data and models",
    ev.ReplicaReady: "data and models",
    ev.DataLoaded: "data and models",
    ev.WeightsLoaded: "weights",
    ev.StepCompleted: "responses and training",
}
"""Parts of the time from the command to the first step; each ends with the last of its events
before the next part begins."""


class ProgressPanel:
    """Display of the newest status; call `update` a few times a second."""

    def __init__(
        self, run_dir: Path, console: Console, *, attached: bool = False, begun_ns: int = 0
    ) -> None:
        """Initialize; `attached`: another process started the run, so the start is not reported.

        `begun_ns`: time of the command; 0: the start of this process."""
        self._run_dir, self._begun_ns, self._attached = run_dir, begun_ns, attached
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        telemetry = Telemetry()
        self._drain = telemetry.wait_drained
        self._notes = telemetry.add_outlet("terminal", self._print_notes)
        self._notes.say = lambda name, lost, reason: self.add_note(
            f"lines lost here: {lost} ({reason})"
        )
        self._due: Outlet[None] = telemetry.add_outlet(
            "panel", lambda _: self._draw_status(), kept=1
        )
        self._end: Outlet[None] = telemetry.add_outlet(
            "end of the panel", lambda _: self._stop(), kept=1
        )
        self._pace = StepPace()
        self._shown: tuple[int, int, str] = (-1, 0, "")
        self._silent: list[str] = []  #: nodes reported as silent
        self._awaited: list[str] = []  #: processes reported as restarting
        self._resumed: set[str] = set()  #: processes that a resumed run begins without
        self._pids: dict[str, int] = {}  #: latest known ids
        self._shown_at = time.monotonic()
        self._told: set[str] = {"start"} if attached else set()
        self._first_step: int | None = None  #: first step seen in a status

    def __enter__(self) -> ProgressPanel:
        return self

    def __exit__(self, *error: object) -> None:
        """Show the latest status, and leave the panel in place."""
        self.update()
        self._drain(DRAIN_S)
        self._end.put(None)
        self._drain(DRAIN_S)

    def add_note(self, text: str) -> None:
        """Print one line above the panel."""
        self._notes.put(text)

    def update(self) -> None:
        """Show the newest status soon."""
        self._due.put(None)

    def _print_notes(self, notes: list[str]) -> None:
        for done, text in enumerate(notes):
            try:
                self._print_line(text)
            except OSError as error:
                raise PartlyWritten(done, error) from error

    def _print_line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw_status(self) -> None:
        status = read_status(self._run_dir)
        if not status:
            return
        self._tell_trouble(status)
        self._tell_silence(status["silent_nodes"])
        if self._first_step is None:
            self._first_step = status["step"]
            self._awaited, self._resumed = status["awaited"], set(status["awaited"])
        self._tell_restarts(status["awaited"], status["processes"], status["lost_by"])
        if status["step"] > self._first_step:
            self._tell_start()
        if self._live is None:
            return self._print_status(status)
        if not self._live.is_started:
            self._live.start()
        self._live.update(self.build_panel(status), refresh=True)

    def _tell_trouble(self, status: dict[str, Any]) -> None:
        """Report, once each: the first reward failure, warnings, mismatches, and a failure."""
        errors = status["reward_errors"]
        if errors and errors["first"]:
            self._tell_once("reward", f"the reward FAILED on a response: {errors['first']}")
        for text in status["warnings"]:
            self._tell_once(text, f"WARNING: {text}")
        for line in status["left_out"]:
            self._tell_once(line, f"MISMATCH: {line}")
        if status["failure"]:
            self._tell_once("failure", f"the run ends: {status['failure']}")

    def _tell_start(self) -> None:
        """Report once the time to the first new step, and its parts."""
        if "start" in self._told:
            return
        self._told.add("start")
        begun_ns = self._begun_ns or int(psutil.Process().create_time() * 1e9)
        with contextlib.suppress(ConfigError):  # an unreadable log is reported elsewhere
            parts = start_parts(self._run_dir, begun_ns)
            text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts)
            total = sum(seconds for _, seconds in parts)
            if total > 0:  # else the run was resumed
                self._print_line(f"the first step is done after {total:.1f} s: {text}")

    def _tell_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._print_line(text)

    def _tell_silence(self, nodes: list[str]) -> None:
        """Report silent nodes: nothing is restarted, but their machines need attention."""
        for node in nodes:
            if node not in self._silent:
                self._print_line(
                    f"no message from {node}: its processes continue, none is restarted"
                )
        for node in self._silent:
            if node not in nodes:
                self._print_line(f"{node} is no longer silent, or its machine is lost")
        self._silent = nodes

    def _tell_restarts(
        self, awaited: list[str], pids: dict[str, int], lost_by: dict[str, str]
    ) -> None:
        """Report lost processes; the run continues as far as it does not need them.

        A process that was restarted at once shows only by its process id.
        """
        for name, pid in pids.items():
            known = self._awaited + awaited
            if self._pids.get(name, pid) != pid and name not in known:
                self._print_line(
                    f"{name} was lost{_format_reason(lost_by, name)}, and was restarted"
                )
        self._pids = pids
        for name in awaited:
            if name not in self._awaited:
                self._print_line(
                    f"{name} is lost{_format_reason(lost_by, name)}: its node restarts it"
                )
        for name in self._awaited:
            if name not in awaited and name not in self._resumed:
                self._print_line(f"{name} is back, or no longer expected")
        self._resumed &= set(awaited)
        self._awaited = awaited

    def _print_status(self, status: dict[str, Any]) -> None:
        """Print one line per step, evaluation or phase, and one after a long quiet time."""
        now = time.monotonic()
        key = (status["step"], len(status["evaluations"]), _describe_phase(status))
        if key == self._shown and now - self._shown_at < QUIET_S:
            return
        if len(status["evaluations"]) > self._shown[1]:
            facts = status["evaluations"][-1]
            self._print_line(f"evaluation after step {facts['step']}: {format_evaluation(facts)}")
        self._shown, self._shown_at = key, now
        self._print_line(self._format_status(status))

    def _format_status(self, status: dict[str, Any]) -> str:
        """Format the status; the least important parts come last, and are cut off first."""
        errors = status["reward_errors"]
        failed = sum(errors["by_reason"].values()) if errors else 0
        parts = [
            f"[{status['seconds']:5.0f} s]",
            f"{_describe_phase(status):<9}",
            self._format_progress(status),
            *([f"REWARD FAILED {failed}/{errors['answers']}"] if errors else []),
            *([status["trainer"]] if status["trainer"] not in ORDINARY else []),
            *([old] if (old := self._describe_age(status)) else []),
            f"{status['tokens_per_s']:.0f} tok/s",
            *([f"{status['repack']['moves']} migrated"] if status["repack"] else []),
        ]
        line = "  ".join(parts)
        return line if len(line) <= LINE_MAX else f"{line[: LINE_MAX - 3]}..."

    def _format_progress(self, status: dict[str, Any]) -> str:
        return format_progress(status, self._pace, time.monotonic())

    def _format_bar(self, status: dict[str, Any]) -> str:
        """Return a progress bar; empty if the number of steps is unknown."""
        if not (total := status["total_steps"]):
            return ""
        done = BAR * min(status["step"], total) // total
        full, empty = "━─" if self._console.encoding.startswith("utf") else "#-"
        return f"[cyan]{full * done}[/cyan][bright_black]{empty * (BAR - done)}[/bright_black]  "

    def _describe_age(self, status: dict[str, Any]) -> str:
        """Return the age of an old status; empty for a recent one, and for a run that has ended."""
        age_s = 0.0 if status["phase"] == Phase.ENDED else measure_status_age(self._run_dir)
        return f"DATA {_format_span(age_s)} OLD" if age_s >= OLD_S else ""

    def build_panel(self, status: dict[str, Any]) -> Table:
        """Return the panel of a status; where another process started the run, with its waits."""
        table = Table(show_header=False, box=None, padding=(0, 2))
        progress = f"{self._format_bar(status)}{self._format_progress(status)}"
        if old := self._describe_age(status):
            table.add_row("[red]old[/red]", f"[red]{old}: the coordinator does not report[/red]")
        table.add_row("[bold]laminar[/bold]", f"{_describe_phase(status):<9}  {progress}")
        errors, repack = status["reward_errors"], status["repack"]
        failed = [f"[red]REWARD FAILED {failed_share(errors)}[/red]"] if errors else []
        stale = f"staleness {status['staleness_mean']:.2f} (max {status['staleness_max']})"
        time_so_far, version = _format_span(status["seconds"]), f"v{status['newest_version']}"
        table.add_row("so far", "  ".join([time_so_far, stale, version, *failed]))
        moved = f", {repack['moves']} migrated" if repack else ""
        ready = f"{status['groups_ready']} groups ready"
        rate = f"{status['tokens_per_s']:.0f} tok/s{moved}"
        table.add_row("trainer", f"{status['trainer']}, {ready}, {rate}")
        if status["replicas"]:
            table.add_row("replicas", _describe_replicas([*status["replicas"].values()]))
        if hosts := [*status["hosts"].values()]:
            counts = (f"{sum(host[what] for host in hosts)} {what}" for what in hosts[0])
            table.add_row("agents", ", ".join(counts))
        for facts in status["evaluations"][-3:]:
            table.add_row("evaluation", f"after step {facts['step']}: {format_evaluation(facts)}")
        if self._attached:
            age_s = measure_status_age(self._run_dir)
            for wait in status.get("waits", [])[:WAITS_MAX]:
                table.add_row("waits", escape(format_wait(wait, status["seconds"] + age_s)))
        return table


class StepPace:
    """Estimator of the remaining time, from the pace of the latest steps."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)

    def estimate_left(self, step: int, total: int, now: float) -> str:
        """Return the remaining time as text, or "" if unknown; `now` in seconds."""
        if not step:  # the time of the start says nothing about the steps
            return ""
        if not self._done or step != self._done[-1][1]:
            self._done.append((now, step))
        (then, first), (last, _) = self._done[0], self._done[-1]
        if step == first or step >= total:
            return ""
        per_step = (last - then) / (step - first)
        return f"{_format_span(max((total - step) * per_step - (now - last), 0.0))} left"


def _format_reason(lost_by: dict[str, str], name: str) -> str:
    """Return the reason of a loss, in brackets; empty if this coordinator did not see it."""
    return f" ({lost_by[name]})" if name in lost_by else ""


def _format_span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"{seconds:.0f} s"


def format_wait(wait: dict[str, Any], now_s: float) -> str:
    """Describe one wait of a status in a line; `now_s` by the clock of the run."""
    until = "" if wait["until"] is None else f" of {_format_span(wait['until'] - wait['since'])}"
    return (
        f"{wait['waiter']}: {wait['event']} from {wait['owner']} ({wait['what']}), for "
        f"{_format_span(max(now_s - wait['since'], 0.0))}{until}, then {wait['then']}"
    )


def failed_share(errors: dict[str, Any]) -> str:
    """Return the number of responses on which the reward failed, and the reasons."""
    by_reason = errors["by_reason"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(by_reason.items()))
    return f"on {sum(by_reason.values())} of {errors['answers']} responses ({reasons})"


def _describe_phase(status: dict[str, Any]) -> str:
    """Return the phase of the run, or its pause."""
    return str(status.get("pause") or status["phase"])


def format_progress(status: dict[str, Any], pace: StepPace, now: float) -> str:
    """Return the step, the reward, the latest evaluation's score, and the time left."""
    total, reward, told = status["total_steps"], status["reward"], status["evaluations"][-1:]
    scores = [facts["share"] if facts["score"] is None else facts["score"] for facts in told]
    left = pace.estimate_left(status["step"], total, now)
    parts = [
        f"step {status['step']}" + (f"/{total}" if total else ""),
        f"reward {reward:.3f}" if reward is not None else "reward -",
        *(f"evaluation {score:.3f}" for score in scores if score is not None),
        *([left] if left else []),
    ]
    return "  ".join(parts)


def _describe_replicas(replicas: list[dict[str, Any]]) -> str:
    """Return the number of replicas by activity, and sums over them; status.json has each."""
    doing = Counter(replica["doing"] for replica in replicas)
    counts = [(sum(r[what] for r in replicas), what) for what in ("running", "waiting")]
    engines = [engine for replica in replicas if (engine := replica["engine"])]
    capacity = sum(engine["kv_capacity_tokens"] for engine in engines)
    used = sum(engine["kv_used_tokens"] for engine in engines)
    sums = [f"{count} {what}" for count, what in counts if count]
    sums += [f"{used / capacity:.0%} of the caches"] if capacity else []
    return "; ".join((", ".join(f"{n} {what}" for what, n in doing.items()), ", ".join(sums)))


def start_parts(run_dir: Path, begun_ns: int) -> list[tuple[str, float]]:
    """Return the parts of the start with their seconds, from the event log, in order of end.

    Empty until a step is completed. `begun_ns`: Unix time of the command; earlier events of a
    resumed run are ignored.
    """
    ends: dict[str, int] = {}
    clock = WallClock()
    for record in read_records(run_dir):
        if not isinstance(record, EventRecord):
            continue
        stamped = parse_event(record)
        at_ns, part = clock.unix_ns(stamped), _START_PARTS.get(type(stamped.event))
        if at_ns < begun_ns:
            continue
        if part is not None:
            ends[part] = at_ns
        if isinstance(stamped.event, ev.StepCompleted):
            return _measure_parts(ends, begun_ns)
    return []


def _measure_parts(ends: dict[str, int], begun_ns: int) -> list[tuple[str, float]]:
    """Return the lengths of the parts, in order; 0 for a part that ended before the previous."""
    lengths = []
    for name in dict.fromkeys(_START_PARTS.values()):
        end_ns = max(ends.get(name, begun_ns), begun_ns)
        lengths.append((name, (end_ns - begun_ns) / 1e9))
        begun_ns = end_ns
    return lengths
