"""Data of a report page: the summary of a run, its figures over the steps, and some samples.

Reads   the facts, timeline/, metrics.jsonl, store.sqlite, config.toml and the logs of the nodes
        of a run directory, running or ended
Gives   PageData
Raises  ConfigError for a run directory that cannot be read
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laminar.analysis.log.process_logs import read_machines
from laminar.analysis.log.timeline import merge_rows, read_json_lines
from laminar.analysis.report.figures import Row, RunFigures
from laminar.analysis.report.prompt_lengths import split_by_length
from laminar.analysis.report.replica_series import Points, ReplicaSeries, build_series
from laminar.analysis.report.samples import Decode, Sample, SampleFilter, find_samples
from laminar.analysis.report.summary import summarize_figures
from laminar.config import Config, ConfigError, load_config
from laminar.run.directory import CONFIG_FILE, METRICS_FILE, STORE_FILE
from laminar.storage import books

STEP = "training/global_step"  #: in a line of metrics.jsonl about a step
RATE_BINS = 40  #: over the time of a run
LENGTH_BINS = 6  #: of trained responses, with about equally many in each
SCORE_BINS = 16  #: of trained responses, with about equally many in each
HISTOGRAM_BINS = 30  #: of response lengths
PERCENTILES = (50, 99)  #: of response lengths
SAMPLES = 3  #: shown of each kind


class PageData(NamedTuple):
    """Data of one run."""

    name: str
    run_dir: Path
    summary: dict[str, Any]
    steps: list[dict[str, Any]]  #: lines of metrics.jsonl about steps
    rates: dict[str, Points]  #: tokens per second over the seconds since the run's first event
    lengths: dict[str, Points]  #: percentiles, by the completed steps that made the weights
    staleness: dict[str, dict[str, float]]  #: length -> staleness -> share of its responses
    scores: Points  #: mean score of trained responses over their mean length
    samples: dict[str, list[Sample]]  #: by title of the kind
    series: ReplicaSeries  #: of its replicas
    histogram: dict[str, Points]  #: share of the trained responses by length, early and late
    config: Config | None  #: None if its file is missing
    machines: dict[str, dict[str, Any]]  #: by node
    started: datetime | None

    def get_points(self, key: str) -> Points:
        """Return one figure of metrics.jsonl over the completed steps."""
        found = [(line[STEP], line[key]) for line in self.steps if key in line]
        return [float(step) for step, _ in found], [float(value) for _, value in found]

    def keys(self, prefix: str) -> list[str]:
        """Return the names of figures with this prefix."""
        return sorted({key for line in self.steps for key in line if key.startswith(prefix)})


def page_data(run_dir: Path, decode: Decode | None) -> PageData:
    """Collect the data of a page; without `decode`, no samples."""
    run = RunFigures(run_dir)
    summary, first_ns = summarize_figures(run), run.first_ns
    trained = run.trained
    return PageData(
        name=run_dir.resolve().name,
        run_dir=run_dir,
        summary=summary,
        steps=_read_metrics(run_dir),
        rates=_compute_rates(run, summary["seconds"]),
        lengths=_compute_lengths(run),
        staleness=_compute_staleness(trained),
        scores=_compute_scores(trained),
        samples={} if decode is None else _select_samples(run_dir, decode),
        series=build_series(run.gauges, run.facts.rows("migrations")),
        histogram=_compute_histograms(trained),
        config=_load_config(run_dir),
        machines=read_machines(run_dir),
        started=datetime.fromtimestamp(first_ns / 1e9, UTC) if first_ns else None,
    )


def _load_config(run_dir: Path) -> Config | None:
    try:
        return load_config([], resolved=run_dir / CONFIG_FILE)
    except ConfigError:
        return None


def _read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines about steps."""
    lines = (line for _, line in read_json_lines(run_dir / METRICS_FILE))
    return [line for line in lines if isinstance(line, dict) and STEP in line]


def _compute_rates(run: RunFigures, seconds: float) -> dict[str, Points]:
    seconds, rows = max(seconds, 1e-3), merge_rows(run.steps.values())
    trained = np.array([(row["completed"], row["tokens"]) for row in run.completed])
    trained = trained.reshape(-1, 2)
    return {
        "generated": _bin_rate((rows[:, 1] - run.first_ns) / 1e9, rows[:, 3], seconds),
        "trained": _bin_rate(trained[:, 0], trained[:, 1], seconds),
    }


def _bin_rate(when: Any, counts: Any, seconds: float) -> Points:
    """Return the token rate of each part of the time, at the middle of the part."""
    edges = np.linspace(0.0, seconds, RATE_BINS + 1)
    tokens = np.histogram(when, bins=edges, weights=counts)[0]
    if not tokens.any():
        return [], []
    middles, width = (edges[:-1] + edges[1:]) / 2, seconds / RATE_BINS
    return middles.tolist(), (tokens / width).tolist()


def _compute_lengths(run: RunFigures) -> dict[str, Points]:
    """Return the percentiles of the trained responses, and of all."""
    found: dict[str, Points] = {}
    for what, part in {"trained": run.trained, "generated": run.generated}.items():
        by_step: dict[int, list[int]] = defaultdict(list)
        for row in part:
            by_step[row["version_step"]].append(row["tokens"])
        steps = sorted(by_step)
        for q in PERCENTILES:
            values = [float(np.percentile(by_step[step], q)) for step in steps]
            found[f"{what} p{q}"] = [float(step) for step in steps], values
    return found


def _compute_staleness(trained: list[Row]) -> dict[str, dict[str, float]]:
    bins: dict[str, dict[str, float]] = {}
    for part in split_by_length(trained, _get_tokens, LENGTH_BINS):
        counts = Counter(row["staleness"] for row in part)
        shares = {str(value): count / counts.total() for value, count in sorted(counts.items())}
        bins[f"{_get_tokens(part[0])} to {_get_tokens(part[-1])}"] = shares
    return bins


def _get_tokens(row: Row) -> int:
    return int(row["tokens"])


def _compute_histograms(trained: list[Row]) -> dict[str, Points]:
    """Return length histograms of the first and the last third of the steps, in equal bins."""
    if not trained:
        return {}
    steps, lengths = np.array([(row["step"], row["tokens"]) for row in trained]).T
    width = max(1, -(-int(np.percentile(lengths, 99.5)) // HISTOGRAM_BINS))
    edges = np.arange(0, int(lengths.max()) + 2 * width, width)
    first, last = steps.min(), steps.max()
    third = (last - first) // 3
    parts = {
        f"steps {first} to {first + third}": lengths[steps <= first + third],
        f"steps {last - third} to {last}": lengths[steps >= last - third],
    }
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    return {
        name: (middles, (np.histogram(part, bins=edges)[0] / len(part)).tolist())
        for name, part in parts.items()
    }


def _compute_scores(trained: list[Row]) -> Points:
    """Return the mean score of each part, at its mean length."""
    scored = [row for row in trained if row["reward"] is not None]
    parts = split_by_length(scored, _get_tokens, SCORE_BINS)
    lengths = [float(np.mean([row["tokens"] for row in part])) for part in parts]
    return lengths, [float(np.mean([row["reward"] for row in part])) for part in parts]


def _select_samples(run_dir: Path, decode: Decode) -> dict[str, list[Sample]]:
    """Select the worst and best samples of the last evaluation, the last step and the first."""
    if not (run_dir / STORE_FILE).is_file():
        return {}
    with books.open_tables(run_dir / STORE_FILE) as tables:
        trained, evaluated = tables.trained_steps(), tables.evaluated_steps()
    chosen: dict[str, SampleFilter] = {}
    if evaluated:
        chosen[f"Evaluation after step {evaluated[-1]}"] = SampleFilter(evaluation=evaluated[-1])
    if trained:
        chosen[f"Trained by step {trained[-1] + 1}"] = SampleFilter(step=trained[-1] + 1)
        chosen[f"Trained by step {trained[0] + 1}"] = SampleFilter(step=trained[0] + 1)
    found: dict[str, list[Sample]] = {}
    for title, choice in chosen.items():
        worst, best = choice._replace(worst=SAMPLES), choice._replace(best=SAMPLES)
        found[f"{title}: the worst"] = list(find_samples(run_dir, worst, decode))
        found[f"{title}: the best"] = list(find_samples(run_dir, best, decode))
    return found
