"""Head of a report page: outcome, main figures, settings and hardware of each run.

Reads   PageData
Gives   HTML: render_head, the outcome and main figures of each run as tiles; render_problems;
        render_tables, all results and facts; of several runs, the better figure is marked

A reader compares these before any chart: two runs with different settings, seeds, machines or
commits are two experiments.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from laminar.analysis.report import summary_lines
from laminar.analysis.report.page_data import PageData
from laminar.config import Config, dump_config, flatten_config

NO_PROBLEMS = "No problems found"


def render_head(runs: Sequence[PageData]) -> Iterator[str]:
    for data in runs:
        yield f"<h1>{escape(data.name)}{_render_badge(data)}</h1>"
        yield f'<p class="faint">{escape(str(data.run_dir))}</p>'
        yield f'<div class="tiles">{"".join(_render_tiles(data))}</div>'


def render_tables(runs: Sequence[PageData]) -> Iterator[str]:
    figures = [_by_name(summary_lines.format_headline(d)) for d in runs]
    facts = [_by_name(list_run_facts(d)) for d in runs]
    yield '<div class="halves">'
    better = _find_better(runs)
    yield f"<div><h2>Results</h2>{''.join(_render_table(runs, figures, better))}</div>"
    yield f"<div><h2>Run</h2>{''.join(_render_table(runs, facts))}"
    for data in runs:
        yield from _render_settings(data, f" of {data.name}" if len(runs) > 1 else "")
    yield "</div></div>"


def render_problems(runs: Sequence[PageData]) -> Iterator[str]:
    yield "<h2>Problems</h2>"
    for data in runs:
        of = f" ({data.name})" if len(runs) > 1 else ""
        found = list(summary_lines.list_problems(data.summary))
        for sentence in found:
            yield f'<div class="trouble">{escape(sentence + of)}</div>'
        if not found:
            yield f'<p class="good">{NO_PROBLEMS}{escape(of)}</p>'


def list_run_facts(data: PageData) -> Iterator[tuple[str, str]]:
    """Yield (name, text) facts about task, settings, code and hardware; names may repeat."""
    c = data.config
    if c is not None:
        yield from _describe_training(c)
    yield "seed", str(data.summary["seed"])
    kinds = Counter(_describe_hardware(m) for m in data.machines.values())
    for text, count in kinds.items():
        yield "hardware", text if count == 1 else f"{count} x {text}"
    if data.machines:
        machine = next(iter(data.machines.values()))
        commit = machine["laminar_commit"]
        at = f" at {commit}" if commit else ""
        yield (
            "laminar",
            f"{machine['laminar'] or '(not installed)'}{at}, Python {machine['python']}",
        )
        if machine["directory_commit"] not in ("", commit):
            yield "working directory", f"{machine['directory']} at {machine['directory_commit']}"
    if data.started is not None:
        yield "started", f"{data.started:%Y-%m-%d %H:%M} UTC"


def _describe_training(c: Config) -> Iterator[tuple[str, str]]:
    if c.is_emulated:
        yield "model", f"emulated, {c.emulation.weights_mb} MiB"
    else:
        files = [Path(name).name for name in c.data.train_files]
        yield "model", Path(c.model.name).name if Path(c.model.name).is_absolute() else c.model.name
        yield "data", c.data.dataset or ", ".join(files)
        yield "reward", _describe_reward(c)
    norm = "" if c.algorithm.norm_adv_by_std_in_grpo else ", advantages not divided by std"
    kl = f", KL loss {c.algorithm.kl_loss_coef:g}" if c.algorithm.use_kl_loss else ""
    yield "algorithm", f"{c.algorithm.adv_estimator}, {c.algorithm.loss_agg_mode}{norm}{kl}"
    yield "learning rate", f"{c.optim.lr:g}, {c.optim.lr_scheduler_type}"
    yield (
        "batch",
        f"{c.data.train_batch_size} prompts x {c.rollout.group_size} responses, at most "
        f"{c.data.max_response_length} tokens each",
    )
    replicas = summary_lines.format_count(c.total_replicas, "replica", "replicas")
    yield (
        "rollout",
        f"{replicas} of {c.rollout.engine}, {c.rollout.max_num_seqs} sequences each, staleness at "
        f"most {c.async_.max_staleness}",
    )


def _describe_reward(c: Config) -> str:
    if names := [function.name or Path(function.path).name for function in c.reward.functions]:
        return " + ".join(names)
    path = c.reward.custom_reward_function.path
    if path or c.reward.kind not in ("auto", "dataset"):
        return Path(path).name if path else c.reward.kind
    return f"scorer of {c.data.dataset}" if c.data.dataset else c.reward.kind


def _describe_hardware(machine: dict[str, Any]) -> str:
    gpus = [f"{count} x {name}" for name, count in Counter(machine["gpus"]).items()]
    return (
        f"{', '.join(gpus) or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:g} GiB"
    )


# --- tables and tiles ---------------------------------------------------------------------------


def _render_badge(data: PageData) -> str:
    code = data.summary["exit_code"]
    kind = "going" if code is None else "failed" if code else "complete"
    return (
        f' <span class="badge {kind}">{escape(summary_lines.format_outcome(data.summary))}</span>'
    )


def _render_tiles(data: PageData) -> Iterator[str]:
    """Yield the main figures as tiles."""
    summary = data.summary
    evaluations = [e for e in summary["evaluations"] if e["share"] is not None]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        error = f"± {100 * (last['share_se'] or 0):.1f}, {last['total']} samples"
        before = f"{100 * first['share']:.1f} → " if len(evaluations) > 1 else ""
        yield _render_tile("eval accuracy", f"{before}{100 * last['share']:.1f} %", error)
    if found := summary_lines.first_to_last(data, "reward/mean"):
        yield _render_tile("reward", found[0].replace("->", "→"), found[1])
    seconds = summary["seconds"]
    yield _render_tile(
        "steps", str(summary["steps"]), f"in {summary_lines.format_duration(seconds)}"
    )
    if (rate := summary["tokens_per_s"]) is not None:
        yield _render_tile("throughput", f"{rate:,.0f}", "sampled tokens per second")
    age, most = summary["staleness_mean"], summary["staleness_max"]
    yield _render_tile("staleness", f"{age:.2f}", f"steps, mean; at most {most}")
    count = len(list(summary_lines.list_problems(summary)))
    text, kind = (str(count), "bad") if count else ("0", "fine")
    yield _render_tile("problems", text, "see below" if count else NO_PROBLEMS.lower(), kind)


def _render_tile(name: str, figure: str, below: str, kind: str = "") -> str:
    return (
        f'<div class="tile {kind}"><span>{escape(name)}</span><b>{escape(figure)}</b>'
        f"<span>{escape(below)}</span></div>"
    )


def _by_name(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Group the texts by name."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(name, []).append(escape(text))
    return found


def _render_table(
    runs: Sequence[PageData],
    columns: Sequence[dict[str, list[str]]],
    better: Mapping[str, int] = {},
) -> Iterator[str]:
    """Yield a table with a row for each name and a column for each run; mark the better cells."""
    yield '<table class="compared">' if len(runs) > 1 else "<table>"
    if len(runs) > 1:
        yield f"<tr><th></th>{''.join(f'<th>{escape(data.name)}</th>' for data in runs)}</tr>"
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = "".join(
            f"<td{' class=better' if better.get(name) == place else ''}>"
            f"{'<br>'.join(column.get(name, ['-']))}</td>"
            for place, column in enumerate(columns)
        )
        yield f"<tr><th>{escape(name)}</th>{cells}</tr>"
    yield "</table>"


COMPARED = {
    "eval accuracy": ("eval_last", max),
    "generated": ("tokens_per_s", max),
    "response latency": ("latency_s_mean", min),
    "truncated": ("truncated_share", min),
    "mismatch KL": ("mismatch_kl_mean", min),
}
"""Figures of which more, or less, is better: key of the summary by name of the row."""


def _find_better(runs: Sequence[PageData]) -> dict[str, int]:
    """Return the run with the better figure by row, where runs differ."""
    found = {}
    for name, (key, choose) in COMPARED.items():
        values = [data.summary[key] for data in runs]
        if None not in values and len(set(values)) > 1:
            found[name] = values.index(choose(values))
    return found


def _render_settings(data: PageData, of: str) -> Iterator[str]:
    """Yield the settings that differ from the defaults, then all of them."""
    if data.config is None:
        return
    default = flatten_config(Config())
    changed = {k: v for k, v in flatten_config(data.config).items() if v != default[k]}
    yield f"<h3>Settings{escape(of)} that are not the defaults</h3>"
    lines = (f"<code>{escape(key)} = {escape(json.dumps(v))}</code>" for key, v in changed.items())
    yield f'<div class="settings">{"".join(lines)}</div>'
    yield f"<details><summary>All settings{escape(of)} (config.toml)</summary>"
    yield f"<pre>{escape(dump_config(data.config))}</pre></details>"
