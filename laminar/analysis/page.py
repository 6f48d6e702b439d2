"""A page about one run, or about several side by side: one HTML file that needs nothing else.

Reads   PageData
Gives   HTML text: figures, charts as inline SVG, answers of the model; no script, font or link

A chart of one line has a line for each run. A chart of several lines is drawn once for each run, on
the same axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from laminar.analysis.charts import Chart, Line, draw, draw_shares
from laminar.analysis.evaluations import is_shaped
from laminar.analysis.headline import headline, troubles
from laminar.analysis.page_data import PageData
from laminar.analysis.replica_series import Points
from laminar.analysis.replicas_page import repack_section, replicas_charts
from laminar.analysis.samples import Sample
from laminar.run.program import typed

SHOWN_CHARS = 4000  #: of a prompt or a response; `laminar samples` shows all of it
GLANCE_CHARS = 110  #: of a response that is not opened

STEPS = "completed steps"

SHARES = (0.0, 1.0)
#: (title, key of metrics.jsonl, unit, range or None): a line for each run
FIGURES = (
    ("Reward, mean of the batch", "reward/mean", "reward", None),
    ("Groups with one score for all, which teach nothing", "groups/no_variance", "share", SHARES),
    ("Entropy", "actor/entropy", "nats per token", None),
    ("Truncated responses", "response_length/clip_ratio", "share of the batch", SHARES),
    ("Gradient norm before clipping", "actor/grad_norm", "norm", None),
    ("Updates that left the weights as they were", "actor/skipped_updates", "of a step", None),
    ("Mismatch of engine and trainer", "mismatch_kl/mean", "KL per token (nats)", None),
    ("Answers on which the reward failed, so far", "reward/errors/total", "answers", None),
)
EXTRA = "reward_extra/"  #: figures of this name are the reward's own, each with a chart

TIME_COLOURS = {
    "busy": "#1f5fa8",
    "stepping": "#1f5fa8",
    "draining": "#7fb0dd",
    "fetching": "#1b8a8f",
    "publishing": "#c4501b",
    "pulling": "#c4501b",
    "probe": "#7d3fb0",
    "saving": "#23804a",
    "exporting": "#8cc29d",
    "waiting_for_batch": "#c2c2c2",
    "back_pressure": "#c2c2c2",
    "waiting_for_evaluation": "#dadada",
    "no_work": "#e4e4e4",
    "other": "#e3b7b7",
}  #: what a process did: work is coloured, waiting is grey

STALENESS_COLOURS = ("#bcd7ee", "#8dbbe3", "#5e9fd6", "#3a7fbf", "#1f5fa8", "#174a85", "#0f3561")

STYLE = """
body { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1c1c1c;
  background: #fff; margin: 24px auto; max-width: 1240px; padding: 0 20px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 30px 0 8px;
  border-bottom: 1px solid #ddd; padding-bottom: 4px; } h3 { font-size: 14px; margin: 16px 0 6px; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 3px 18px 3px 0;
  vertical-align: top; } th { font-weight: 600; white-space: nowrap; }
.grid { display: grid; gap: 22px 30px;
  grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); }
svg { width: 100%; max-width: 620px; height: auto; display: block; } svg text { font-size: 12px;
  fill: #1c1c1c; } svg .title { font-size: 13.5px; font-weight: 600; } svg .label { fill: #444; }
svg .faint { fill: #666; } svg .grid { stroke: #e3e3e3; } svg .axis { stroke: #555; }
.trouble { background: #fdf1e7; border-left: 4px solid #c4501b; padding: 6px 12px; margin: 6px 0; }
.faint { color: #555; } details { border: 1px solid #ddd; border-radius: 4px; margin: 6px 0;
  padding: 5px 10px; } summary { cursor: pointer; } pre { white-space: pre-wrap;
  overflow-wrap: anywhere; background: #f6f6f6; padding: 6px 9px; margin: 4px 0 8px; }
.glance { font-family: ui-monospace, monospace; font-size: 12.5px; color: #444; margin-left: 8px; }
.score { display: inline-block; min-width: 74px; font-weight: 600; }
"""


def html(runs: Sequence[PageData]) -> str:
    """The whole page."""
    title = escape(" beside ".join(data.name for data in runs))
    body = [
        f"<h1>{title}</h1>",
        f'<p class="faint">{escape(", ".join(str(d.run_dir) for d in runs))}</p>',
        *_figures(runs),
        *_troubles(runs),
        "<h2>Learning</h2>",
        *_grid([*_held_out(runs), *(_figure(runs, *figure) for figure in FIGURES)]),
        *_extras(runs),
        "<h2>Lengths and staleness</h2>",
        *_grid([*_lengths(runs), *(_staleness(data, runs) for data in runs), _scores(runs)]),
        "<h2>Speed, and where the time went</h2>",
        *_grid([*_rates(runs), *(_times(data, runs) for data in runs), *replicas_charts(runs)]),
        *repack_section(runs),
        *(part for data in runs for part in _samples(data, runs)),
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>'


def _grid(charts: Sequence[str]) -> list[str]:
    return ['<div class="grid">', *(f"<div>{chart}</div>" for chart in charts), "</div>"]


def _of(data: PageData, runs: Sequence[PageData]) -> str:
    """For titles: which run, where there are several."""
    return f" ({data.name})" if len(runs) > 1 else ""


def _figures(runs: Sequence[PageData]) -> Iterator[str]:
    """A row for each figure, a column for each run."""
    columns = [_by_name(data) for data in runs]
    yield "<table>"
    if len(runs) > 1:
        yield f"<tr><th></th>{''.join(f'<th>{escape(data.name)}</th>' for data in runs)}</tr>"
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = "".join(f"<td>{'<br>'.join(column.get(name, ['-']))}</td>" for column in columns)
        yield f"<tr><th>{escape(name)}</th>{cells}</tr>"
    yield "</table>"


def _by_name(data: PageData) -> dict[str, list[str]]:
    """A figure may have several lines."""
    found: dict[str, list[str]] = {}
    for name, text in headline(data):
        found.setdefault(name, []).append(escape(text))
    return found


def _troubles(runs: Sequence[PageData]) -> Iterator[str]:
    yield "<h2>What went wrong</h2>"
    for data in runs:
        found = list(troubles(data.summary))
        for sentence in found:
            yield f'<div class="trouble">{escape(sentence + _of(data, runs))}</div>'
        if not found:
            yield f'<p class="faint">nothing that was noticed{escape(_of(data, runs))}</p>'


# --- learning -----------------------------------------------------------------------------------


def _held_out(runs: Sequence[PageData]) -> list[str]:
    """What is right; where a reward is shaped, the mean score, too."""
    right = _evaluated(runs, "share", 100)
    title = "Held-out answers that are correct, ± standard error"
    charts = [draw(Chart(title, STEPS, "% of the answers", right, y_range=(0, 100)))]
    if any(is_shaped(facts) for data in runs for facts in data.summary["evaluations"]):
        title = "Held-out answers: mean score, ± standard error"
        charts.append(draw(Chart(title, STEPS, "score", _evaluated(runs, "score", 1))))
    return charts


def _evaluated(runs: Sequence[PageData], key: str, factor: float) -> list[Line]:
    """One figure of every evaluation that has it."""
    lines = []
    for data in runs:
        found = [facts for facts in data.summary["evaluations"] if facts[key] is not None]
        steps = [float(facts["step"]) for facts in found]
        values = [factor * facts[key] for facts in found]
        errors = [factor * (facts[f"{key}_se"] or 0.0) for facts in found]
        lines.append(Line(data.name, steps, values, errors, marks=True))
    return lines


def _figure(
    runs: Sequence[PageData],
    title: str,
    key: str,
    unit: str,
    y_range: tuple[float, float] | None = None,
) -> str:
    lines = [Line(data.name, *data.figure(key)) for data in runs]
    return draw(Chart(title, STEPS, unit, lines, y_range))


def _extras(runs: Sequence[PageData]) -> list[str]:
    """What the reward functions gave besides the score."""
    keys = sorted({key for data in runs for key in data.keys(EXTRA)})
    if not keys:
        return []
    charts = [_figure(runs, key.removeprefix(EXTRA), key, "mean of the batch") for key in keys]
    return ["<h2>The reward's own figures</h2>", *_grid(charts)]


# --- lengths, staleness, speed ------------------------------------------------------------------


def _same_y(runs: Sequence[PageData], found: Sequence[Sequence[Points]]) -> tuple[float, float]:
    """One range for the same chart of every run."""
    values = [y for points in found for _, ys in points for y in ys]
    return 0.0, max(values, default=0.0) * 1.05 or 1.0


def _lengths(runs: Sequence[PageData]) -> Iterator[str]:
    parts = [[*data.lengths.trained.values(), *data.lengths.generated.values()] for data in runs]
    y_range = _same_y(runs, parts)
    for data in runs:
        lines = [
            Line(f"{what} p{q}", *points, dashed=dashed, colour=colour)
            for what, dashed, by_q in (
                ("trained", False, data.lengths.trained),
                ("generated", True, data.lengths.generated),
            )
            for colour, (q, points) in enumerate(by_q.items())
        ]
        title = f"Response length{_of(data, runs)}"
        x_label = "completed steps that made the weights"
        yield draw(Chart(title, x_label, "tokens", lines, y_range=y_range))


def _staleness(data: PageData, runs: Sequence[PageData]) -> str:
    found = sorted({int(value) for shares in data.staleness.values() for value in shares})
    colours = {
        str(value): STALENESS_COLOURS[min(i, len(STALENESS_COLOURS) - 1)]
        for i, value in enumerate(found)
    }
    bars = {
        f"{name} tok": {v: shares[v] for v in colours if v in shares}
        for name, shares in data.staleness.items()
    }
    title = f"Staleness (steps) by response length{_of(data, runs)}"
    return draw_shares(title, bars, colours, "share of the trained responses of this length")


def _scores(runs: Sequence[PageData]) -> str:
    lines = [Line(data.name, *data.scores, marks=True) for data in runs]
    title = "Mean score of trained responses by their length"
    return draw(Chart(title, "tokens", "score", lines))


def _rates(runs: Sequence[PageData]) -> Iterator[str]:
    y_range = _same_y(runs, [[data.rates.generated, data.rates.trained] for data in runs])
    for data in runs:
        lines = [Line("generated", *data.rates.generated), Line("trained", *data.rates.trained)]
        title = f"Response tokens per second{_of(data, runs)}"
        yield draw(Chart(title, "seconds since the start", "tokens/s", lines, y_range=y_range))


def _times(data: PageData, runs: Sequence[PageData]) -> str:
    shares: Mapping[str, Mapping[str, float]] = data.summary["time_shares"]
    title = f"What each process did{_of(data, runs)}"
    return draw_shares(title, shares, TIME_COLOURS, "share of its life")


# --- answers ------------------------------------------------------------------------------------


def _samples(data: PageData, runs: Sequence[PageData]) -> Iterator[str]:
    yield f"<h2>What the model wrote{escape(_of(data, runs))}</h2>"
    if not data.samples:
        yield '<p class="faint">no answers to show</p>'
    for title, samples in data.samples.items():
        yield f"<h3>{escape(title)}</h3>"
        for sample in samples:
            yield from _sample(sample)
    command = typed("samples", data.run_dir)
    yield f'<p class="faint">All of it: <code>{escape(command)}</code></p>'


def _sample(sample: Sample) -> Iterator[str]:
    row = sample.row
    score = "-" if sample.score is None else f"{sample.score:.4g}"
    cut = ", truncated" if sample.truncated else ""
    yield (
        f'<details><summary><span class="score">score {score}</span> {row.id}: {row.num_tokens} '
        f"tokens{cut}, version {row.weight_version} on {escape(sample.sampled_on)} "
        f'<span class="glance">{escape(_glance(sample.response))}</span></summary>'
    )
    if row.reward_reason not in (None, "", "ok") or row.reward_detail:
        reason = f"{row.reward_reason} {row.reward_detail or ''}".strip()
        yield f'<div class="trouble">reward FAILED: {escape(reason)}</div>'
    if sample.extras:
        extras = ", ".join(f"{name} {value}" for name, value in sample.extras.items())
        yield f"<div>{escape(extras)}</div>"
    for name, text in (
        ("prompt", sample.prompt),
        ("response", sample.response),
        ("right answer", "" if sample.answer is None else str(sample.answer)),
    ):
        left = len(text) - SHOWN_CHARS
        more = f" ... and {left:,} more characters" if left > 0 else ""
        yield f"<b>{name}</b><pre>{escape(text[:SHOWN_CHARS])}{more}</pre>"
    yield "</details>"


def _glance(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= GLANCE_CHARS else f"{line[:GLANCE_CHARS]}..."
