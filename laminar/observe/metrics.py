"""metrics.jsonl and the boards of `trainer.logger`, written from the events as they are applied.

Reads   StepCompleted, WeightsLoaded, TokenProgress and the state after them
Writes  RUN/metrics.jsonl (one line per step or evaluation), by the telemetry thread
Gives   the same figures to the boards

Each line names its event, so a coordinator that restarts and replays its log writes each figure
once. A step's figures cover the time since the previous step, so the replay must begin no later
than the last step in the file (`replay_from`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from laminar.config import ConfigError
from laminar.core.state import evaluation_scores
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.observe.board import Scalars
from laminar.observe.engine_gauges import RepackCounts, StepGauges
from laminar.observe.files import GrowingFile
from laminar.observe.telemetry import Outlet, Telemetry
from laminar.run.directory import METRICS_FILE

#: Keys that only the line of a step, or of an evaluation, has.
_STEP, _EVALUATION = "training/global_step", "val/version"


Earlier = Callable[[dict[str, float]], None]
"""Receives the figures of each step that an earlier coordinator wrote, oldest first."""


def _discard(figures: dict[str, float]) -> None:
    """Discard the figures; the default receiver."""


@dataclass
class _Written:
    """The content of a file that an earlier coordinator has written."""

    earlier: Earlier
    event: int = 0  #: last event of any line
    step_event: int = 0  #: last event of the line of a step
    evaluations: int = 0

    def read_line(self, line: bytes) -> None:
        try:
            figures = json.loads(line)
            event = int(figures["event"])
        except (ValueError, KeyError, TypeError):
            return  # a line that a crash or a full disk cut short
        self.event = max(self.event, event)
        if _STEP in figures:
            self.step_event = max(self.step_event, event)
            self.earlier(figures)
        self.evaluations += _EVALUATION in figures


class MetricsWriter:
    """Observer of the coordinator that writes the metrics."""

    def __init__(
        self,
        run_dir: Path,
        telemetry: Telemetry,
        boards: Sequence[Outlet[Scalars]] = (),
        earlier: Earlier = _discard,
    ) -> None:
        """Continue an existing file; ConfigError if it cannot be read."""
        written = _read_written(run_dir / METRICS_FILE, earlier)
        self._after = written.event
        self.replay_from = written.step_event  #: first event that a replay must include
        self._lines = telemetry.add_outlet("metrics", GrowingFile(run_dir, METRICS_FILE).write)
        self._boards = boards
        self._pulls: list[float] = []
        self._probe_kls: list[float] = []
        self._gauges, self._repack = StepGauges(), RepackCounts()
        self._evaluations = written.evaluations
        self._last: tuple[int, int] = (0, 0)  #: time and generated tokens at the previous step

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        event = stamped.event
        self._gauges.record_event(stamped, state)
        self._repack.record_commands(commands, state)
        if isinstance(event, ev.WeightsLoaded):
            self._pulls.append(event.seconds)
            if event.probe_kl is not None:
                self._probe_kls.append(event.probe_kl)
        elif isinstance(event, ev.StepCompleted):
            figures = self._step(stamped, event, state) | _trained_groups(commands, state)
            self._write(stamped, event.step_index + 1, figures)
        if len(state.evaluations.results) > self._evaluations:
            self._evaluations = len(state.evaluations.results)
            facts = evaluation_scores.describe_evaluation(state.evaluations.results[-1])
            self._write(stamped, facts["step"], _compute_evaluation(facts))

    def _step(self, stamped: Stamped, event: ev.StepCompleted, state: State) -> dict[str, float]:
        """Return the trainer's figures together with those of the coordinator."""
        ledger = state.work.ledger
        then, tokens_before = self._last
        seconds = (stamped.time_ns - then) / 1e9 if then else 0.0
        generated = sum(r.tokens_total for r in state.members.replicas.values())
        self._last = (stamped.time_ns, generated)
        trained = max(ledger.trajectories.trained, 1)
        figures = {
            _STEP: event.step_index + 1,
            "training/weights_unchanged": float(not event.changed),
            "staleness/mean": state.steps.staleness_sum / trained,
            "staleness/max": state.steps.staleness_max,
            "weights/version_lag": event.version
            - min((r.version for r in state.members.replicas.values()), default=event.version),
            "rollout/inflight": sum(len(r.running) for r in state.members.replicas.values()),
            "rollout/queue": len(state.work.ready),
            "ledger/issued_tokens": ledger.tokens.issued,
            "ledger/trained_tokens": ledger.tokens.trained,
            "ledger/evaluated_tokens": ledger.tokens.evaluated,
            "ledger/dropped_tokens": sum(ledger.tokens.dropped.values()),
            "ledger/live_tokens": ledger.tokens.live,
            **{f"ledger/dropped_groups/{why}": n for why, n in ledger.groups.dropped.items()},
            "events/seq": stamped.seq,
            **_reward_errors(state),
            **self._gauges.drain_figures(),
            **(self._repack.drain_figures() if state.settings.repack_policy else {}),
        }
        if seconds > 0:
            figures["timing_s/between_steps"] = seconds
            figures["throughput/tokens_per_s"] = max(generated - tokens_before, 0) / seconds
        if self._pulls:
            figures["weights/pull_s"] = sum(self._pulls) / len(self._pulls)
            self._pulls.clear()
        if self._probe_kls:
            figures["mismatch_kl/probe"] = fmean(self._probe_kls)
            self._probe_kls.clear()
        return event.metrics | figures

    def _write(self, stamped: Stamped, step: int, figures: dict[str, float]) -> None:
        if stamped.seq <= self._after:
            return
        line = {"step": step, "event": stamped.seq, "time_ns": stamped.time_ns, **figures}
        self._lines.put(json.dumps(line).encode() + b"\n")
        # a name per version would be a tag per step
        shown = {n: value for n, value in figures.items() if not n.startswith("by_origin/")}
        for board in self._boards:
            board.put(Scalars(step, time.time(), shown))


def _trained_groups(commands: list[Command], state: State) -> dict[str, float]:
    """Return how many groups of the step have siblings that different weights generated."""
    endings = [e for c in commands if isinstance(c, cmd.EndTrajectories) for e in c.endings]
    groups = {ending.group for ending in endings if ending.end == "trained"}
    return {"groups/mixed_versions": float(sum(state.work.groups[g].mixed for g in groups))}


def _compute_evaluation(facts: dict[str, Any]) -> dict[str, float]:
    """Return the figures of an evaluation, with verl's names if it has one, without empty ones."""
    n, folder = facts["answers_per_prompt"], f"val-core/{'export' if facts['final'] else 'policy'}"
    figures = {
        f"acc/mean@{n}": facts["share"],
        "acc/se": facts["share_se"],
        f"score/mean@{n}": facts["score"],
        "score/se": facts["score_se"],
        "response_length/mean": facts["mean_length"],
        "response_length/clip_ratio": facts["truncated_share"],
        "missing": facts["missing"],
        **({f"acc/pass@{n}": facts["passed"]} if n > 1 else {}),
        **{f"reward_extra/{name}": value for name, value in facts["extras"].items()},
    }
    known = {f"{folder}/{name}": value for name, value in figures.items() if value is not None}
    return {_EVALUATION: facts["version"], **known}


def _reward_errors(state: State) -> dict[str, float]:
    """Return the number of responses on which the reward failed, by reason and in total."""
    errors = state.signals.rewards.errors if state.signals.rewards else {}
    by_reason = {f"reward/errors/{reason}": count for reason, count in errors.items()}
    return {"reward/errors/total": sum(errors.values()), **by_reason}


def _read_written(path: Path, earlier: Earlier = _discard) -> _Written:
    """Read the complete lines of the file, one at a time; zeros for a new file."""
    found = _Written(earlier)
    try:
        with open(path, "rb") as lines:
            for line in lines:
                found.read_line(line)
    except FileNotFoundError:
        return found
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): move it away, otherwise metrics would be written "
            "twice"
        ) from error
    return found
