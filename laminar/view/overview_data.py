"""Figures of a run: how it does in one sentence, its problems, its curves, its processes.

Reads   tables of facts, and the last state
Gives   describe_run, list_problems, list_curves, list_health_curves, list_processes,
        list_tool_calls
"""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from laminar.analysis.report.figures import read_gauges
from laminar.analysis.report.replica_series import build_series
from laminar.analysis.report.summary_lines import format_duration
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.view.timeline_data import Tables

ENDS = 5  #: steps that are averaged at either end
RECENT = 10  #: steps from which pace and remaining time are estimated

Points = list[tuple[float, float]]


class Curve(NamedTuple):
    """Figure over the steps of a run, or over its seconds."""

    title: str
    points: Points
    x_label: str = "completed steps"


def list_curves(tables: Tables) -> list[Curve]:
    """Return the curves of the overview."""
    tests = tables("evaluations").select(["step", "share"]).to_pylist()
    age, figures = "training/off_policy/trajectory_staleness/mean", _list_figures(tables)
    return [
        _read_metric(figures, "reward, mean of the batch", "reward/mean"),
        Curve(
            "evaluation, share correct",
            [(r["step"], r["share"]) for r in tests if r["share"] is not None],
        ),
        _read_metric(figures, "staleness, mean steps", age, "staleness/token_mean"),
        Curve("trained tokens per second", _compute_rates(tables)),
    ]


def list_health_curves(tables: Tables) -> list[Curve]:
    """Return the mismatch of engines and trainer, its memory, and the use of the caches."""
    memory = ("perf/max_memory_allocated_gb", "perf/max_resident_gb")
    figures, cache = _list_figures(tables), build_series(read_gauges(tables("gauges")), [])
    points = list(zip(cache.kv_percent.x, cache.kv_percent.mean, strict=True))
    return [
        _read_metric(figures, "mismatch KL per token", "mismatch_kl/mean"),
        _read_metric(figures, "memory of the trainer, GB", *memory),
        _read_metric(figures, "gradient norm", "actor/grad_norm"),
        Curve("KV cache in use, % of its tokens, mean of replicas", points, "seconds"),
    ]


def describe_run(tables: Tables, state: State, seconds: float) -> str:
    """Return how the run does in one sentence."""
    done, total = state.steps.completed, state.settings.total_steps
    phase, took = _describe_phase(state, done >= total), format_duration(seconds)
    parts = [f"{phase}: {done} of {total} steps in {took}"]
    for curve, ends in zip(list_curves(tables)[:2], (ENDS, 1), strict=True):
        if values := [value for _, value in curve.points]:
            first, last = fmean(values[:ends]), fmean(values[-ends:])
            parts.append(f"{curve.title.partition(',')[0]} {first:.3g} → {last:.3g}")
    rates, times = _compute_rates(tables), _list_completed(tables)
    if rates:
        parts.append(f"{median(rate for _, rate in rates[-RECENT:]):,.0f} trained tokens/s")
    if state.run.phase == Phase.RUNNING and len(times) > 2:
        recent = [time for _, time, _ in times[-RECENT - 1 :]]
        left = (total - done) * (recent[-1] - recent[0]) / (len(recent) - 1)
        parts.append(f"about {format_duration(left)} left")
    return ", ".join(parts) + "."


def list_problems(tables: Tables, state: State) -> list[str]:
    """Return what a reader must not overlook, a sentence each, with what to do."""
    failed = state.run.failed
    found = [f"The run failed: {failed.sentence}. {failed.kind.record.remedy}."] if failed else []
    return found + [f"step {row['step']}: {row['text']}" for row in tables("warnings").to_pylist()]


def list_processes(tables: Tables, state: State) -> list[dict[str, Any]]:
    """Return a row per process: its machine and pid, how often it was restarted, and why."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(tables("processes").to_pylist(), key=lambda row: row["joined"] or 0.0):
        name = row["process"]
        lives = row["ended"] is None and state.run.phase != Phase.ENDED
        before = found.get(name, {"restarts": -1, "last lost because": None})
        found[name] = {
            "process": name,
            "machine": row["node"] or "-",
            "pid": str(row["pid"] or "-"),
            "state": "live" if lives else "ended",
            "since": f"{(row['ended'] or row['joined']) or 0.0:,.1f} s",
            "restarts": before["restarts"] + 1,
            "last lost because": row["reason"] or before["last lost because"],
        }
    return sorted(found.values(), key=lambda row: (-row["restarts"], row["process"]))


def list_tool_calls(tables: Tables) -> list[dict[str, Any]]:
    """Return a row per tool and outcome."""
    sums: Any = [("seconds", name) for name in ("count", "mean", "max")]
    rows = tables("tool_calls").group_by(["tool", "status"]).aggregate(sums)
    return [
        {name.replace("_", " "): value for name, value in row.items()}
        for row in rows.sort_by("tool").to_pylist()
    ]


def _describe_phase(state: State, is_done: bool) -> str:
    if state.run.failed is not None:
        return "Failed"
    if state.run.phase != Phase.ENDED:
        return str(state.run.phase).capitalize()
    return "Paused" if state.run.paused else "Complete" if is_done else "Stopped"


def _list_figures(tables: Tables) -> list[tuple[int, dict[str, float]]]:
    """Return the figures of each step, in order."""
    rows = tables("steps").select(["step", "metrics"]).sort_by("step").to_pylist()
    return [(row["step"], json.loads(row["metrics"] or "{}")) for row in rows]


def _read_metric(steps: list[tuple[int, dict[str, float]]], title: str, *names: str) -> Curve:
    """Return a figure of the steps: the first of these names that a step has."""
    points: Points = []
    for step, figures in steps:
        points += [(step, figures[name]) for name in names if name in figures][:1]
    return Curve(title, points)


def _list_completed(tables: Tables) -> list[tuple[int, float, int]]:
    """Return (step, time, tokens) of every completed step, in order."""
    rows = tables("steps").select(["step", "completed", "tokens"]).to_pylist()
    done = (row for row in rows if row["completed"] is not None)
    return sorted((row["step"], row["completed"], row["tokens"] or 0) for row in done)


def _compute_rates(tables: Tables) -> Points:
    """Return the response tokens of each step per second since the step before it."""
    pairs = pairwise(_list_completed(tables))
    return [(now[0], now[2] / max(now[1] - then[1], 1e-9)) for then, now in pairs]
