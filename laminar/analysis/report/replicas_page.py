"""Section of a report page about the replicas over time, and about repack.

Reads   PageData
Gives   HTML: charts of cache, running and waiting sequences; for runs with and without repack, the
        results of each policy. Empty where there is nothing to show
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any, NamedTuple

from laminar.analysis.report.charts import Chart, ChartLine, Drawn, draw_figures, render_rows
from laminar.analysis.report.confidence import Estimate, estimate_gain, estimate_mean
from laminar.analysis.report.page_data import PageData

SECONDS = "seconds since the start"

Summary = Mapping[str, Any]
OFF = "off"


def chart_replicas(runs: Sequence[PageData]) -> list[Drawn]:
    """Chart cache, running and waiting sequences: a line per run, the mean over its replicas."""
    charts: list[Drawn] = []
    for title, unit, bands in (
        ("Cache in use", "% of its tokens", {d.name: d.series.kv_percent for d in runs}),
        ("Sequences running", "per replica", {d.name: d.series.running for d in runs}),
        ("Sequences waiting", "per replica", {d.name: d.series.waiting for d in runs}),
    ):
        lines = [ChartLine(name, b.x, b.mean, band=b.ends) for name, b in bands.items() if b.x]
        lines = [replace(line, name="mean") for line in lines] if len(runs) == 1 else lines
        what = f"{title}: mean, lowest and highest replica"
        if lines:
            charts.append(Chart(what, SECONDS, unit, lines))
    return charts


def render_repack(runs: Sequence[PageData]) -> Iterator[str]:
    """Yield the section if a run uses repack; compare policies only if there are several."""
    with_it = [data for data in runs if data.summary["repack"]]
    if not with_it:
        return
    yield "<h2>Repack</h2>"
    found = summarize_policies([data.summary for data in runs])
    moved = [ChartLine(data.name, *data.series.moved) for data in with_it]
    emptied = [ChartLine(data.name, *data.series.emptied) for data in with_it]
    yield from render_rows(
        [
            *([_chart_throughput(found)] if len(found) > 1 else []),
            Chart("Trajectories migrated so far", SECONDS, "trajectories", moved),
            Chart("Replicas emptied so far", SECONDS, "replicas", emptied),
        ]
    )
    if len(found) > 1:
        yield from _render_table(found)
        for name, pairs, gain in compute_gains([data.summary for data in runs]):
            count = "one pair of runs" if pairs == 1 else f"{pairs} pairs of runs"
            yield (
                f"<p>{escape(name)}: {_plus_minus(gain, 100, '+.1f')} % tokens per second against "
                f"off ({count} with the same seed)</p>"
            )


def _chart_throughput(found: Sequence[PolicyStats]) -> Drawn:
    figures = [
        (f"{p.name} ({p.runs})", p.tokens_per_s.mean, p.tokens_per_s.half or 0.0)
        for p in found
        if p.tokens_per_s is not None
    ]
    title = "Sampled tokens per second by policy (runs), with 95 % intervals"
    return partial(draw_figures, title, figures, "tokens/s")


def _render_table(found: Sequence[PolicyStats]) -> Iterator[str]:
    figures = [
        ("runs", [str(p.runs) for p in found]),
        ("tokens/s", [_plus_minus(p.tokens_per_s, 1, ",.0f") for p in found]),
        ("response latency, mean (s)", [_format_figure(p.latency_mean_s) for p in found]),
        ("response latency, max (s)", [_format_figure(p.latency_max_s) for p in found]),
        ("migration, mean (s)", [_format_figure(p.hand_over_s) for p in found]),
        ("cache in use, mean", [_format_percent(p.kv_use) for p in found]),
        ("nearly empty decode steps", [_format_percent(p.nearly_empty) for p in found]),
    ]
    yield f"<table><tr><th></th>{''.join(f'<th>{escape(p.name)}</th>' for p in found)}</tr>"
    for name, cells in figures:
        yield f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table>"


def _plus_minus(found: Estimate | None, factor: float, form: str) -> str:
    if found is None:
        return "-"
    half = "" if found.half is None else f" ± {factor * found.half:{form.removeprefix('+')}}"
    return f"{factor * found.mean:{form}}{half}"


def _format_figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


class PolicyStats(NamedTuple):
    """Mean results of the runs with one repack policy; None where none has the figure.

    With several runs, the interval is that of their mean; with a single run, that of its
    throughput.
    Gains are of pairs: two runs with the same seed.
    """

    name: str
    runs: int
    tokens_per_s: Estimate | None
    latency_mean_s: float | None
    latency_max_s: float | None
    hand_over_s: float | None
    kv_use: float | None
    nearly_empty: float | None


def get_policy(summary: Summary) -> str:
    return str(summary["repack"]["policy"]) if summary["repack"] else OFF


def summarize_policies(summaries: Sequence[Summary]) -> list[PolicyStats]:
    """Return the policies of some runs: without repack first, then in order of appearance."""
    names = dict.fromkeys(map(get_policy, summaries))
    order = sorted(names, key=lambda name: name != OFF)
    return [
        _summarize_policy(name, [s for s in summaries if get_policy(s) == name]) for name in order
    ]


def _summarize_policy(name: str, runs: Sequence[Summary]) -> PolicyStats:
    rates = estimate_mean([s["tokens_per_s"] for s in runs if s["tokens_per_s"] is not None])
    if rates is not None and len(runs) == 1:
        rates = Estimate(rates.mean, runs[0]["tokens_per_s_ci95"])
    hand_overs = [s["repack"]["hand_over_s"] for s in runs if s["repack"]]
    return PolicyStats(
        name,
        len(runs),
        rates,
        _mean([s["latency_s_mean"] for s in runs]),
        max((s["latency_s_max"] for s in runs if s["latency_s_max"] is not None), default=None),
        _mean([found["mean"] for found in hand_overs if found]),
        _mean([s["kv_use_mean"] for s in runs]),
        _mean([s["nearly_empty_steps"] for s in runs]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    found = estimate_mean([value for value in values if value is not None])
    return found.mean if found else None


def compute_gains(summaries: Sequence[Summary]) -> Iterator[tuple[str, int, Estimate]]:
    """Yield (policy, pairs, relative gain in throughput) of each policy that has pairs."""
    by_policy: dict[str, dict[int, float]] = {}
    for summary in summaries:
        if summary["tokens_per_s"] is not None:
            rates = by_policy.setdefault(get_policy(summary), {})
            rates[summary["seed"]] = summary["tokens_per_s"]
    without = by_policy.pop(OFF, {})
    for name, rates in by_policy.items():
        seeds = sorted(without.keys() & rates.keys())
        gain = estimate_gain([without[s] for s in seeds], [rates[s] for s in seeds])
        if gain is not None:
            yield name, len(seeds), gain
