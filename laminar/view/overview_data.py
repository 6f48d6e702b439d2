"""Figures of the overview: how a run does in one sentence, and its curves.

Reads   tables of facts, and the last state
Gives   describe_run, list_curves, estimate_seconds_left; read_metrics, of each step
"""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.view.timeline_data import Tables

ENDS = 5  #: steps that are averaged at either end
RECENT = 10  #: steps from which the remaining time is estimated


class Curve(NamedTuple):
    """Figure over the steps of a run."""

    title: str
    steps: list[int]
    values: list[float]


def read_metrics(tables: Tables) -> list[tuple[int, dict[str, float]]]:
    """Return (step, figures by name) of every completed step, in order."""
    steps = tables("steps").select(["step", "metrics"]).to_pylist()
    found = {row["step"]: json.loads(row["metrics"]) for row in steps if row["metrics"]}
    return sorted(found.items())


def list_curves(tables: Tables) -> list[Curve]:
    """Return the curves of the overview; one without values is empty."""
    metrics = read_metrics(tables)
    tests = tables("evaluations").select(["step", "share"]).to_pylist()
    scored = [(row["step"], row["share"]) for row in tests if row["share"] is not None]
    age = "training/off_policy/trajectory_staleness/mean"
    return [
        _make_curve("reward, mean of the batch", _select(metrics, "reward/mean")),
        _make_curve("evaluation, share correct", scored),
        _make_curve("staleness, mean steps", _select(metrics, age, "staleness/token_mean")),
        _make_curve("trained tokens per second", _compute_rates(tables)),
    ]


def describe_run(tables: Tables, state: State, seconds: float) -> str:
    """Return how the run does in a sentence or two."""
    done, total = state.steps.completed, state.settings.total_steps
    curves = {curve.title.partition(",")[0]: curve for curve in list_curves(tables)}
    parts = [_describe_phase(state, done, total, seconds)]
    for name, texts in (("reward", "reward"), ("evaluation", "evaluation")):
        if values := curves[name].values:
            first, last = fmean(values[:ENDS]), fmean(values[-ENDS:])
            if name == "evaluation":
                first, last = values[0], values[-1]
            parts.append(f"{texts} {first:.3g} → {last:.3g}")
    if rates := _compute_rates(tables):
        parts.append(f"{median(rate for _, rate in rates[-RECENT:]):,.0f} trained tokens/s")
    left = estimate_seconds_left(tables, state)
    if left is not None:
        parts.append(f"about {_format_duration(left)} left")
    return ", ".join(parts) + "."


def estimate_seconds_left(tables: Tables, state: State) -> float | None:
    """Return the time to the last step at the pace of the last ones; None: unknown, or over."""
    times = sorted(time for time in tables("steps")["completed"].to_pylist() if time is not None)
    todo = state.settings.total_steps - state.steps.completed
    if state.run.phase != Phase.RUNNING or todo <= 0 or len(times) < 3:
        return None
    recent = times[-RECENT - 1 :]
    return float(todo * (recent[-1] - recent[0]) / (len(recent) - 1))


def list_problems(tables: Tables, state: State) -> list[str]:
    """Return what a reader must not overlook, a sentence each, with what to do."""
    found = []
    if state.run.failed is not None:
        record = state.run.failed.kind.record
        found.append(f"The run failed: {state.run.failure}. To continue: {record.remedy}.")
    for row in tables("warnings").to_pylist():
        found.append(f"From step {row['step']} on: {row['text']}")
    return found


def _describe_phase(state: State, done: int, total: int, seconds: float) -> str:
    if state.run.failed is not None:
        return f"Failed after {done} of {total} steps"
    if state.run.phase == Phase.ENDED:
        how = "Paused" if state.run.paused else "Complete" if done >= total else "Stopped"
        return f"{how}: {done} of {total} steps in {_format_duration(seconds)}"
    if state.run.phase == Phase.RUNNING:
        return f"Running: {done} of {total} steps after {_format_duration(seconds)}"
    return f"In phase {state.run.phase}: {done} of {total} steps"


def _select(metrics: list[tuple[int, dict[str, float]]], *names: str) -> list[tuple[int, float]]:
    """Return the first of these figures that a step has."""
    found = ((step, next((m[n] for n in names if n in m), None)) for step, m in metrics)
    return [(step, value) for step, value in found if value is not None]


def _compute_rates(tables: Tables) -> list[tuple[int, float]]:
    """Return the response tokens of each step per second since the step before it."""
    rows = tables("steps").select(["step", "completed", "tokens"]).to_pylist()
    done = sorted((r["step"], r["completed"], r["tokens"]) for r in rows if r["completed"])
    return [(now[0], now[2] / max(now[1] - then[1], 1e-9)) for then, now in pairwise(done)]


def _make_curve(title: str, points: list[tuple[int, float]]) -> Curve:
    return Curve(title, [step for step, _ in points], [float(value) for _, value in points])


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def list_processes(tables: Tables) -> list[dict[str, Any]]:
    """Return a row per process: its machine and pid, how often it was restarted, and why."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(tables("processes").to_pylist(), key=lambda row: row["joined"] or 0.0):
        restarts = found[row["process"]]["restarts"] + 1 if row["process"] in found else 0
        before = found.get(row["process"], {}).get("last lost because")
        found[row["process"]] = {
            "process": row["process"],
            "machine": row["node"],
            "pid": str(row["pid"] or "-"),
            "state": "live" if row["ended"] is None else "ended",
            "since": f"{row['joined'] if row['ended'] is None else row['ended']:.1f} s",
            "restarts": restarts,
            "last lost because": row["reason"] or before,
        }
    order = {"rollout": 1}
    return sorted(found.values(), key=lambda row: order.get(row["process"].split("-")[0], 0))


def list_tool_calls(tables: Tables) -> list[dict[str, Any]]:
    """Return a row per tool and outcome."""
    calls = tables("tool_calls")
    groups = calls.group_by(["tool", "status"]).aggregate(
        [("seconds", "count"), ("seconds", "mean"), ("seconds", "max")]
    )
    rows = sorted(groups.to_pylist(), key=lambda row: (str(row["tool"]), str(row["status"])))
    return [
        {
            "tool": row["tool"],
            "outcome": row["status"],
            "calls": row["seconds_count"],
            "mean seconds": row["seconds_mean"],
            "longest": row["seconds_max"],
        }
        for row in rows
    ]


def list_health_curves(tables: Tables) -> list[Curve]:
    """Return the mismatch of engines and trainer, and the memory of the trainer, over the steps."""
    metrics = read_metrics(tables)
    memory = ("perf/max_memory_allocated_gb", "perf/max_resident_gb")
    return [
        _make_curve("mismatch KL per token", _select(metrics, "mismatch_kl/mean")),
        _make_curve("memory of the trainer, GB", _select(metrics, *memory)),
        _make_curve("gradient norm", _select(metrics, "actor/grad_norm")),
    ]
