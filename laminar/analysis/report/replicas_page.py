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
    found = list_policies([data.summary for data in runs])
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


class PolicyRuns(NamedTuple):
    """Summaries of the runs with one repack policy."""

    name: str
    runs: list[Summary]

    def estimate_rate(self) -> Estimate | None:
        """Return the throughput, with the interval of its mean, or else of the only run."""
        rates = [s["tokens_per_s"] for s in self.runs if s["tokens_per_s"] is not None]
        if len(self.runs) == 1 and rates:
            return Estimate(rates[0], self.runs[0]["tokens_per_s_ci95"])
        return estimate_mean(rates)

    def list_figures(self) -> dict[str, str]:
        """Return the rows of the table, by name."""
        slowest = [s["latency_s_max"] for s in self.runs if s["latency_s_max"] is not None]
        given_away = [s["repack"]["hand_over_s"] for s in self.runs if s["repack"]]
        return {
            "runs": str(len(self.runs)),
            "tokens/s": _plus_minus(self.estimate_rate(), 1, ",.0f"),
            "response latency, mean (s)": self._format_mean("latency_s_mean", ".3g"),
            "response latency, max (s)": f"{max(slowest):.3g}" if slowest else "-",
            "migration, mean (s)": _format_mean([s["mean"] for s in given_away if s], ".3g"),
            "cache in use, mean": self._format_mean("kv_use_mean", ".1%"),
            "nearly empty decode steps": self._format_mean("nearly_empty_steps", ".1%"),
        }

    def _format_mean(self, key: str, form: str) -> str:
        return _format_mean([s[key] for s in self.runs], form)


def _chart_throughput(found: Sequence[PolicyRuns]) -> Drawn:
    rates = [(f"{p.name} ({len(p.runs)})", p.estimate_rate()) for p in found]
    figures = [(name, rate.mean, rate.half or 0.0) for name, rate in rates if rate is not None]
    title = "Sampled tokens per second by policy (runs), with 95 % intervals"
    return partial(draw_figures, title, figures, "tokens/s")


def _render_table(found: Sequence[PolicyRuns]) -> Iterator[str]:
    columns = [p.list_figures() for p in found]
    yield f"<table><tr><th></th>{''.join(f'<th>{escape(p.name)}</th>' for p in found)}</tr>"
    for name in columns[0]:
        yield f"<tr><th>{name}</th>{''.join(f'<td>{c[name]}</td>' for c in columns)}</tr>"
    yield "</table>"


def _plus_minus(found: Estimate | None, factor: float, form: str) -> str:
    if found is None:
        return "-"
    half = "" if found.half is None else f" ± {factor * found.half:{form.removeprefix('+')}}"
    return f"{factor * found.mean:{form}}{half}"


def _format_mean(values: Sequence[float | None], form: str) -> str:
    found = estimate_mean([value for value in values if value is not None])
    return "-" if found is None else f"{found.mean:{form}}"


def get_policy(summary: Summary) -> str:
    return str(summary["repack"]["policy"]) if summary["repack"] else OFF


def list_policies(summaries: Sequence[Summary]) -> list[PolicyRuns]:
    """Return the policies of some runs: without repack first, then in order of appearance."""
    names = sorted(dict.fromkeys(map(get_policy, summaries)), key=lambda name: name != OFF)
    return [PolicyRuns(n, [s for s in summaries if get_policy(s) == n]) for n in names]


def compute_gains(summaries: Sequence[Summary]) -> Iterator[tuple[str, int, Estimate]]:
    """Yield (policy, pairs, relative gain in throughput) of each policy that has pairs.

    A pair is two runs with the same seed."""
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
