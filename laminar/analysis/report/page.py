"""Report page of one run, or of several for comparison: one self-contained HTML file.

Reads   PageData
Gives   HTML text: head, charts as inline SVG, responses of the model; no font, link or network. A
        few lines of script show the values under the pointer; without them each point has a title

A chart of one line has a line for each run. A chart of several lines is drawn once for each run, on
the same axes. A figure that is the same in every step is a line of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape

from laminar.analysis.log.evaluations import is_shaped
from laminar.analysis.report import charts
from laminar.analysis.report.charts import (
    GAP,
    PAGE_WIDTH,
    Chart,
    ChartLine,
    Drawn,
    draw_shares,
    format_number,
    render_rows,
)
from laminar.analysis.report.page_data import PERCENTILES, PageData
from laminar.analysis.report.page_head import render_head, render_problems, render_tables
from laminar.analysis.report.replicas_page import chart_replicas, render_repack
from laminar.analysis.report.samples import Sample
from laminar.events.reasons import RewardOutcome
from laminar.run.command_line import shell_command

SHOWN_CHARS = 4000  #: of a prompt or a response; `laminar samples` shows all of it
GLANCE_CHARS = 52  #: of a prompt, a response or a reference answer in collapsed form
REPLICAS_SHOWN = 16  #: most replicas with a bar each
SPECIAL = re.compile(r"<\|[^|<>]*\|>")  #: chat template tokens, left out of the collapsed form

STEPS = "completed steps"

#: (title, key of metrics.jsonl, unit): a line for each run
FIGURES = (
    ("Loss", "actor/pg_loss", "policy loss"),
    ("Learning rate", "actor/lr", "of the step"),
    ("Entropy", "actor/entropy", "nats per token"),
    ("Gradient norm", "actor/grad_norm", "before clipping"),
    ("Clip fraction", "actor/pg_clipfrac", "share of the tokens"),
    ("PPO KL", "actor/ppo_kl", "nats per token"),
    ("KL to the reference", "actor/kl_loss", "nats per token"),
    ("KL of engine and trainer", "mismatch_kl/mean", "nats per token"),
    ("The same at equal weights", "mismatch_kl/probe", "nats per token"),
    ("Groups with zero reward variance", "groups/no_variance", "share of the groups"),
    ("Truncated responses", "response_length/clip_ratio", "share of the batch"),
    ("Skipped updates", "actor/skipped_updates", "per step"),
    ("Reward failures", "reward/errors/total", "responses so far"),
)
REWARD = ("Reward, mean of the batch", "reward/mean", "reward")  #: on the first screen
ADVANTAGE = "critic/advantages/mean"
ADVANTAGES = ("max", "mean", "min")  #: suffixes of critic/advantages
ORIGINS = ("trained", "generated")  #: of response lengths
RATES = ("Response tokens per second", "seconds since the start", "tokens/s")
EXTRA = "reward_extra/"  #: prefix of the reward's extra figures, each with a chart

TIME_COLOURS = {
    "busy": "#1f5fa8",
    "stepping": "#5b9bd5",
    "draining": "#b5d3ee",
    "fetching": "#1b8a8f",
    "publishing": "#c4501b",
    "pulling": "#eda268",
    "probe": "#7d3fb0",
    "saving": "#23804a",
    "exporting": "#8cc29d",
    "waiting_for_batch": "#8c959f",
    "staleness_bound": "#bcc2c9",
    "waiting_for_evaluation": "#d9c9e6",
    "no_work": "#e8eaed",
    "other": "#e3b7b7",
}  #: states of a process: work is coloured, waiting is pale; colours are unique in the legend

STALENESS_COLOURS = ("#bcd7ee", "#8dbbe3", "#5e9fd6", "#3a7fbf", "#1f5fa8", "#174a85", "#0f3561")

STYLE = """
:root { --line: #e1e4e8; --faint: #57606a; }
body { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1c1c1c;
  background: #fff; margin: 26px auto 60px; max-width: WIDTHpx; padding: 0 20px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 34px 0 12px;
  border-bottom: 1px solid var(--line); padding-bottom: 5px; }
h3 { font-size: 14px; margin: 18px 0 6px; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 2px 18px 2px 0;
  vertical-align: top; } th { font-weight: 500; white-space: nowrap; color: var(--faint); }
.badge { font-size: 12.5px; font-weight: 600; border-radius: 10px; padding: 2px 10px;
  vertical-align: 4px; margin-left: 8px; background: #ddf4e4; color: #116329; }
.badge.failed { background: #ffe3e0; color: #a40e26; }
.badge.going { background: #ddf0ff; color: #0a4a8f; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0 20px; }
.tile { flex: 1 1 150px; border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 21px; font-weight: 600; line-height: 1.35; }
.tile span { font-size: 12.5px; color: var(--faint); display: block; }
.tile.fine b { color: #1a7f37; } .tile.bad b { color: #c4501b; }
.halves, .row { display: flex; flex-wrap: wrap; gap: 10px GAPpx; }
.halves > div, .row > div { flex: 1 1 360px; min-width: 0; }
.compared { table-layout: fixed; width: 100%; } .compared td { overflow-wrap: anywhere; }
.better { color: #1a7f37; font-weight: 600; }
.row { margin-bottom: 18px; } svg { width: 100%; height: auto; display: block; }
CHARTS
.trouble { background: #fff4ec; border-left: 4px solid #c4501b; padding: 6px 12px; margin: 6px 0; }
.good { color: #1a7f37; margin: 6px 0; } .faint { color: var(--faint); margin: 2px 0; }
.flat { color: var(--faint); margin: 4px 0 0; } .flat b { color: #1c1c1c; font-weight: 500; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 6px 0; padding: 6px 12px; }
summary { cursor: pointer; } pre { white-space: pre-wrap; overflow-wrap: anywhere;
  background: #f6f8fa; padding: 7px 10px; margin: 4px 0 8px; border-radius: 4px; }
code { font: 12.5px ui-monospace, monospace; } .settings { margin: 0 0 10px; }
.settings code { display: block; overflow-wrap: anywhere; }
.sample > summary { display: grid; grid-template-columns: 96px 6fr 6fr 3fr; gap: 14px;
  align-items: baseline; } .sample > summary::marker { content: ""; }
.glance { font: 12.5px ui-monospace, monospace; color: #333; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; } .of { color: #8c959f; }
.reward { font-weight: 600; white-space: nowrap; }
#tip { position: fixed; display: none; pointer-events: none;
  background: #24292f; color: #fff; font-size: 12px; line-height: 1.45; padding: 5px 9px;
  border-radius: 5px; white-space: pre; z-index: 2; }
@media print { .tile, details { break-inside: avoid; } .row { break-inside: avoid; } }
"""
SCRIPT = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg")) {
  const points = [...svg.querySelectorAll("circle, rect")].flatMap(shape => {
    const title = shape.querySelector("title");
    if (!title) return [];
    title.remove();
    return [{shape, text: title.textContent, x: +shape.getAttribute("cx")}];
  });
  const circles = points.filter(p => p.shape.tagName == "circle");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const at = (event.clientX - box.left) * scale;
    let shown = points.filter(p => p.shape == event.target && p.shape.tagName == "rect");
    if (!shown.length && circles.length) {
      const near = circles.reduce((a, b) => Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a).x;
      shown = circles.filter(p => Math.abs(p.x - near) < 0.5);
    }
    tip.textContent = shown.map(p => p.text).join("\\n");
    tip.style.display = shown.length ? "block" : "none";
    const left = event.clientX + 14, over = left + tip.offsetWidth - innerWidth;
    tip.style.left = (over > 0 ? event.clientX - 14 - tip.offsetWidth : left) + "px";
    tip.style.top = (event.clientY + 14) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
"""


def render_page(runs: Sequence[PageData]) -> str:
    """Render the whole page."""
    title = escape(" vs ".join(data.name for data in runs))
    body = [
        *render_head(runs),
        *render_rows(_chart_first_screen(runs)),
        *render_problems(runs),
        *render_tables(runs),
        "<h2>Learning</h2>",
        *_render_learning(runs),
        *_render_extras(runs),
        "<h2>Lengths and staleness</h2>",
        *render_rows(_chart_lengths(runs)),
        "<h2>Speed, and where the time went</h2>",
        *render_rows([*_align_y(_chart_each(runs, *RATES, _list_rates)), *chart_replicas(runs)]),
        *render_repack(runs),
        *(part for data in runs for part in _render_samples(data, runs)),
        f'<div id="tip"></div><script>{SCRIPT}</script>',
    ]
    style = STYLE.replace("CHARTS", charts.STYLE).replace("GAP", str(GAP))
    style = style.replace("WIDTH", str(PAGE_WIDTH))
    top = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{top}</head><body>{"".join(body)}</body></html>'


def _chart_first_screen(runs: Sequence[PageData]) -> list[Drawn]:
    """Chart what the run learned, and what each of its processes did."""
    rewarded = any(data.get_points(REWARD[1])[0] for data in runs)
    rewards = [_chart_metric(runs, *REWARD)] if rewarded else []
    return [*chart_evaluations(runs), *rewards, *(_chart_times(data, runs) for data in runs)]


def _format_run_name(data: PageData, runs: Sequence[PageData]) -> str:
    """Return the part of a title that names the run; empty for a single run."""
    return f" ({data.name})" if len(runs) > 1 else ""


# --- learning -----------------------------------------------------------------------------------


def _render_learning(runs: Sequence[PageData]) -> Iterator[str]:
    """Yield charts of the figures that change, and one line for those that do not."""
    found: list[Chart] = []
    still = []
    for title, key, unit in FIGURES:
        values = {value for data in runs for value in data.get_points(key)[1]}
        if len(values) > 1:
            found.append(_chart_metric(runs, title, key, unit))
        elif values:
            still.append(
                f"{title[0].lower() if title[1:2].islower() else title[0]}{title[1:]} "
                f"<b>{format_number(values.pop())}</b>"
            )
        if key == "actor/pg_loss":
            labels = ("Advantages of the batch", STEPS, "advantage")
            found += [c for c in _chart_each(runs, *labels, _list_advantages) if c.lines]
    yield from render_rows(found)
    if still:
        yield f'<p class="flat">The same in every step: {", ".join(still)}</p>'


def chart_evaluations(runs: Sequence[PageData]) -> list[Chart]:
    """Return the chart of the accuracy and, for a shaped reward, of the mean reward, if any."""
    if not any(data.summary["evaluations"] for data in runs):
        return []
    right = _build_evaluation_lines(runs, "share", 100)
    title = "Evaluation accuracy, ± standard error"
    found = [Chart(title, STEPS, "% of the samples", right, y_range=(0, 100))]
    if any(is_shaped(facts) for data in runs for facts in data.summary["evaluations"]):
        title = "Mean evaluation reward, ± standard error"
        found.append(Chart(title, STEPS, "reward", _build_evaluation_lines(runs, "score", 1)))
    return found


def _build_evaluation_lines(runs: Sequence[PageData], key: str, factor: float) -> list[ChartLine]:
    """Return a line per run: one figure of every evaluation that has it."""
    lines = []
    for data in runs:
        found = [facts for facts in data.summary["evaluations"] if facts[key] is not None]
        steps = [float(facts["step"]) for facts in found]
        values = [factor * facts[key] for facts in found]
        errors = [factor * (facts[f"{key}_se"] or 0.0) for facts in found]
        lines.append(ChartLine(data.name, steps, values, errors, marks=True))
    return lines


def _chart_metric(runs: Sequence[PageData], title: str, key: str, unit: str) -> Chart:
    lines = [ChartLine(data.name, *data.get_points(key)) for data in runs]
    return Chart(title, STEPS, unit, lines)


def _chart_each(
    runs: Sequence[PageData],
    title: str,
    x_label: str,
    y_label: str,
    list_lines: Callable[[PageData], Sequence[ChartLine]],
) -> list[Chart]:
    """Return a chart of several lines for each run."""
    titles = [f"{title}{_format_run_name(data, runs)}" for data in runs]
    parts = zip(titles, map(list_lines, runs), strict=True)
    return [Chart(name, x_label, y_label, lines) for name, lines in parts]


def _align_y(found: Sequence[Chart]) -> list[Chart]:
    """Return charts with one y range, from 0."""
    values = [y for chart in found for line in chart.lines for y in line.y if y is not None]
    y_range = (0.0, max(values, default=0.0) * 1.05 or 1.0)
    return [replace(chart, y_range=y_range) for chart in found]


def _list_advantages(data: PageData) -> list[ChartLine]:
    if not data.get_points(ADVANTAGE)[0]:
        return []
    return [ChartLine(n, *data.get_points(f"critic/advantages/{n}")) for n in ADVANTAGES]


def _render_extras(runs: Sequence[PageData]) -> list[str]:
    """Render the extra figures of the reward functions."""
    keys = sorted({key for data in runs for key in data.keys(EXTRA)})
    if not keys:
        return []
    found = [_chart_metric(runs, key.removeprefix(EXTRA), key, "mean of the batch") for key in keys]
    return ["<h2>Metrics of the reward function</h2>", *render_rows(found)]


# --- lengths, staleness, speed ------------------------------------------------------------------


def _chart_lengths(runs: Sequence[PageData]) -> Iterator[Drawn]:
    """Yield charts of the response lengths and their change, and what depends on the length."""
    labels = ("Trained response lengths", "tokens", "share of the responses")
    for chart in _chart_each(runs, *labels, _list_histograms):
        longest = max((x for line in chart.lines for x in line.x), default=1.0)
        yield replace(chart, x_range=(0, longest))
    labels = ("Response length", "completed steps of the weights", "tokens")
    yield from _align_y(_chart_each(runs, *labels, _list_percentiles))
    lines = [ChartLine(data.name, *data.scores, marks=True) for data in runs]
    yield Chart("Mean reward of trained responses by their length", "tokens", "reward", lines)
    yield from (_chart_staleness(data, runs) for data in runs)


def _list_histograms(data: PageData) -> list[ChartLine]:
    return [ChartLine(name, *points, stairs=True) for name, points in data.histogram.items()]


def _list_percentiles(data: PageData) -> list[ChartLine]:
    names = [(c, f"{what} p{q}") for c, q in enumerate(PERCENTILES) for what in ORIGINS]
    return [
        ChartLine(name, *data.lengths[name], dashed=name.startswith(ORIGINS[1]), colour=colour)
        for colour, name in names
    ]


def _chart_staleness(data: PageData, runs: Sequence[PageData]) -> Drawn:
    found = sorted({int(value) for shares in data.staleness.values() for value in shares})
    colours = {
        str(value): STALENESS_COLOURS[min(i, len(STALENESS_COLOURS) - 1)]
        for i, value in enumerate(found)
    }
    bars = {
        f"{name} tok": {v: shares[v] for v in colours if v in shares}
        for name, shares in data.staleness.items()
    }
    title = f"Staleness (steps) by response length{_format_run_name(data, runs)}"
    unit = "share of the trained responses of this length"
    return partial(draw_shares, title, bars, colours, unit)


def _list_rates(data: PageData) -> list[ChartLine]:
    return [ChartLine(name, *points) for name, points in data.rates.items()]


def _chart_times(data: PageData, runs: Sequence[PageData]) -> Drawn:
    shares = by_process(data.summary["time_shares"])
    title = f"Time per process{_format_run_name(data, runs)}"
    return partial(draw_shares, title, shares, TIME_COLOURS, "share of its lifetime")


def by_process(shares: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    """Return the shares of each process; many replicas are replaced by their mean."""
    replicas = [name for name in shares if name.startswith("rollout")]
    if len(replicas) <= REPLICAS_SHOWN:
        return shares
    states = dict.fromkeys(state for name in replicas for state in shares[name])
    mean = {s: sum(shares[n].get(s, 0.0) for n in replicas) / len(replicas) for s in states}
    others = {name: parts for name, parts in shares.items() if name not in replicas}
    return {**others, f"{len(replicas)} replicas": mean}


# --- responses ----------------------------------------------------------------------------------


def _render_samples(data: PageData, runs: Sequence[PageData]) -> Iterator[str]:
    yield f"<h2>Sample responses{escape(_format_run_name(data, runs))}</h2>"
    if not data.samples:
        yield '<p class="faint">No responses to show</p>'
    for title, samples in data.samples.items():
        yield f"<h3>{escape(title)}</h3>"
        for sample in samples:
            yield from _render_sample(sample)
    command = shell_command("samples", data.run_dir)
    yield f'<p class="faint">Full text: <code>{escape(command)}</code></p>'


def _render_sample(sample: Sample) -> Iterator[str]:
    row = sample.row
    reward = "-" if sample.reward is None else f"{sample.reward:.3g}"
    answer = "" if sample.answer is None else str(sample.answer)
    glances = [
        f'<span class="glance"><span class="of">{name}</span> {escape(text)}</span>'
        for name, text in (
            ("prompt", _shorten_text(SPECIAL.sub(" ", sample.prompt), end=True)),
            ("response", _shorten_text(sample.response)),
            ("truth", _shorten_text(answer)),
        )
    ]
    yield '<details class="sample"><summary>'
    yield f'<span class="reward">reward {reward}</span>{"".join(glances)}</summary>'
    cut = f", truncated ({sample.truncated_by})" if sample.truncated else ""
    yield (
        f'<p class="faint">{row.id}: {row.num_tokens} tokens{cut}, {sample.sampled_by} on '
        f"{escape(sample.sampled_on)}</p>"
    )
    if row.reward_reason not in (None, "", RewardOutcome.OK) or row.reward_detail:
        reason = f"{row.reward_reason} {row.reward_detail or ''}".strip()
        yield f'<div class="trouble">reward FAILED: {escape(reason)}</div>'
    if sample.extras:
        extras = ", ".join(f"{name} {value}" for name, value in sample.extras.items())
        yield f"<div>{escape(extras)}</div>"
    for name, text in (
        ("prompt", sample.prompt),
        ("response", sample.response),
        ("ground truth", answer),
    ):
        left = len(text) - SHOWN_CHARS
        more = f" ... and {left:,} more characters" if left > 0 else ""
        yield f"<b>{name}</b><pre>{escape(text[:SHOWN_CHARS])}{more}</pre>"
    yield "</details>"


def _shorten_text(text: str, *, end: bool = False) -> str:
    """Shorten a text to its beginning, or a prompt to its end, where the question is."""
    line = " ".join(text.split())
    if len(line) <= GLANCE_CHARS:
        return line
    return f"…{line[-GLANCE_CHARS:]}" if end else f"{line[:GLANCE_CHARS]}…"
