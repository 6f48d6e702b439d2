"""metrics.jsonl and TensorBoard, written from the events as they are applied.

Reads   StepCompleted, WeightsPublished, WeightsLoaded and the state after them
Writes  RUN/metrics.jsonl (one line per step or evaluation), RUN/tensorboard/

Each line names the event that it came from, so a coordinator that comes back and replays its log
writes each figure once. A step's figures reach back to the step before, so the replay has to begin
no later than the last step in the file (`replay_from`).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from laminar.core.state import State
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.rundir import METRICS_FILE, TENSORBOARD_DIR

#: A line with one of these is that of a step, or of an evaluation.
_STEP, _EVALUATION = "training/global_step", "val/version"


class MetricsWriter:
    """An observer of the coordinator."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        path = run_dir / METRICS_FILE
        written = _lines(path)
        self._after = max((int(line["event"]) for line in written), default=0)
        #: the first event that a replay must show again
        self.replay_from = max((int(x["event"]) for x in written if _STEP in x), default=0)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._board_dir = run_dir / TENSORBOARD_DIR if tensorboard else None
        self._board: Any = None
        #: importing and writing TensorBoard must not keep the coordinator from its socket
        self._board_thread = ThreadPoolExecutor(1, "tensorboard")
        self._pulls: list[float] = []
        self._evaluations = sum(_EVALUATION in line for line in written)
        self._last: tuple[int, int] = (0, 0)  #: time and trained tokens at the step before

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        event = stamped.event
        if isinstance(event, ev.WeightsLoaded):
            self._pulls.append(event.seconds)
        elif isinstance(event, ev.StepCompleted):
            self._write(stamped, event.step + 1, self._step(stamped, event, state))
        if len(state.evaluations) > self._evaluations:
            self._evaluations = len(state.evaluations)
            result = state.evaluations[-1]
            share = result.correct / result.total
            kind = "export" if result.final else "policy"
            figures = {f"val-core/{kind}/acc/mean@1": share, _EVALUATION: result.version}
            self._write(stamped, result.step, figures)

    def _step(self, stamped: Stamped, event: ev.StepCompleted, state: State) -> dict[str, float]:
        """The trainer's figures, and what only the coordinator knows."""
        ledger = state.ledger
        then, tokens_before = self._last
        seconds = (stamped.time_ns - then) / 1e9 if then else 0.0
        generated = sum(r.tokens_total for r in state.replicas.values())
        self._last = (stamped.time_ns, generated)
        trained = max(ledger.trajectories.trained, 1)
        figures = {
            _STEP: event.step + 1,
            "staleness/mean": state.staleness_sum / trained,
            "staleness/max": state.staleness_max,
            "weights/version_lag": event.version
            - min((r.version for r in state.replicas.values()), default=event.version),
            "rollout/inflight": sum(len(r.running) for r in state.replicas.values()),
            "rollout/queue": len(state.ready),
            "ledger/issued_tokens": ledger.tokens.issued,
            "ledger/trained_tokens": ledger.tokens.trained,
            "ledger/evaluated_tokens": ledger.tokens.evaluated,
            "ledger/dropped_tokens": sum(ledger.tokens.dropped.values()),
            "ledger/live_tokens": ledger.tokens.live,
            "events/seq": stamped.seq,
            **_reward_errors(state),
        }
        if seconds > 0:
            figures["timing_s/between_steps"] = seconds
            figures["throughput/tokens_per_s"] = max(generated - tokens_before, 0) / seconds
        if self._pulls:
            figures["weights/pull_s"] = sum(self._pulls) / len(self._pulls)
            self._pulls.clear()
        return event.metrics | figures

    def _write(self, stamped: Stamped, step: int, figures: dict[str, float]) -> None:
        if stamped.seq <= self._after:
            return
        line = {"step": step, "event": stamped.seq, "time_ns": stamped.time_ns, **figures}
        self._file.write(json.dumps(line) + "\n")
        if self._board_dir is not None:
            self._board_thread.submit(self._write_board, step, figures)

    def _write_board(self, step: int, figures: dict[str, float]) -> None:
        """In the board's own thread, one call at a time."""
        if self._board is None:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._board_dir))
        for name, value in figures.items():
            if not name.startswith("by_origin/"):  # a name per version would be a tag per step
                self._board.add_scalar(name, value, step)
        self._board.flush()


def _reward_errors(state: State) -> dict[str, float]:
    """Answers so far on which the reward failed, by reason and together."""
    errors = state.rewards.errors if state.rewards else {}
    by_reason = {f"reward/errors/{reason}": count for reason, count in errors.items()}
    return {"reward/errors/total": sum(errors.values()), **by_reason}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the file; none for a new one."""
    whole = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            figures = json.loads(line)
        except ValueError:
            continue  # the line that a crash cut short
        if isinstance(figures, dict) and "event" in figures:
            whole.append(figures)
    return whole
