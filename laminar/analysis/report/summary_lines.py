"""Text summary of a run in a dozen lines: results, cost and problems.

Reads   PageData
Gives   format_headline: (name, text) pairs; list_problems: sentences; format_outcome, groups_line,
        skipped_line, length_line, range_line, first_to_last: parts of them; format_count, a number
        with its noun
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from laminar.analysis.log.evaluations import (
    format_accuracy,
    format_details,
    format_score,
    is_shaped,
)
from laminar.analysis.report.page_data import PageData
from laminar.analysis.report.utilization import NEARLY_EMPTY

ENDS_SHARE = 0.1
"""Share of the steps averaged at either end, because single batches vary."""


def format_headline(data: PageData) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run as (name, text), the most wanted first."""
    summary = data.summary
    yield "outcome", format_outcome(summary)
    if found := summary["forked_from"]:
        rows = "its data" if found["same_data"] else "other data, from the first row"
        yield "forked from", f"{found['run']} at step {found['step']}, with {rows}"
    yield "steps", f"{summary['steps']} in {summary['seconds']:.0f} s"
    yield "groups", groups_line(summary)
    yield from _format_evaluations(summary["evaluations"])
    for found in summary["eval_by_prompt_length"]:
        yield "  by prompt length", range_line(found)
    yield "reward", _first_to_last(data, "reward/mean")
    yield "entropy (nats)", _first_to_last(data, "actor/entropy")
    yield "length (tokens)", _format_lengths(summary)
    yield "truncated", _format_share(summary["truncated_share"], "of trained responses")
    yield "staleness", f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']} steps"
    for found in summary["by_length"]:
        yield "  by length", length_line(found)
    yield "mismatch KL", _format_figure(summary["mismatch_kl_mean"], "per token")
    if found := summary["trainer_memory_gb"]:
        yield "trainer's memory", _format_memory(found)
    yield "generated", _format_throughput(summary)
    if summary["latency_s_mean"] is not None:
        mean, longest = summary["latency_s_mean"], summary["latency_s_max"]
        yield "answers took", f"mean {mean:.3g} s, max {longest:.3g} s from their first placement"
    if summary["kv_use_mean"] is not None:
        yield "cache in use", _format_share(summary["kv_use_mean"], "of its tokens")
    if summary["nearly_empty_steps"] is not None:
        share = _format_share(summary["nearly_empty_steps"], "of the decode steps")
        yield "nearly empty", f"{share}: at most one slot in {NEARLY_EMPTY} in use"
    yield from _format_repack(summary["repack"])
    yield "reward errors", _format_errors(summary)
    if summary["calls"] is not None:
        yield "calls of tools", calls_line(summary["calls"])


def calls_line(found: Mapping[str, Any]) -> str:
    """Format the number of calls, their outcomes, their latency, and the cost of a turn."""
    ends = [f"{end} {count:,}" for end, count in sorted(found["by_end"].items())]
    ends += [f"{count:,} responses {end}" for end, count in sorted(found["ended_by"].items())]
    parts = [f"{found['made']:,}" + (f" ({', '.join(ends)})" if ends else "")]
    if found["seconds_p50"] is not None:
        parts.append(f"p50 {found['seconds_p50']:.3g} s, p99 {found['seconds_p99']:.3g} s")
    parts.append(f"{found['tokens_read_again']:,} tokens read again for next turns")
    return "; ".join(parts)


def list_problems(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield every problem that a reader must not overlook, one sentence each."""
    if summary["failure"]:
        yield f"the run FAILED: {summary['failure']}"
    if summary["interrupted"]:
        yield "stopped on request, before its last step"
    yield from summary["warnings"].values()
    if summary["reward_errors"]:
        first = summary["reward_error_first"]
        yield f"the reward FAILED on {_format_errors(summary)}" + (
            f", first: {first}" if first else ""
        )
    if count := summary["trajectories_left_out"]:
        whose = sorted({f"{part['replica']} v{part['version']}" for part in summary["left_out"]})
        left_out = format_count(count, "trajectory", "trajectories")
        yield (
            f"{left_out} not trained: the weights that they name did not generate them "
            f"({', '.join(whose)})"
        )
    if summary["steps_unchanged"]:
        yield skipped_line(summary)
    for reason, count in summary["groups_dropped"].items():
        yield f"{format_count(count, 'group', 'groups')} dropped: {reason}"
    if summary["tokens_restarted"]:
        yield f"{summary['tokens_restarted']:,} sampled tokens thrown away by restarts"
    if summary["coordinator_incarnations"] > 1:
        yield f"the coordinator was started {summary['coordinator_incarnations']} times"


def _format_memory(found: Mapping[str, float]) -> str:
    """Format peak memory: allocated on the GPU, or the resident size without a GPU."""
    measured = next((n for n in ("max_memory_allocated", "max_resident") if n in found), None)
    parts = {
        "max_memory_allocated": "allocated on its GPU at most",
        "max_resident": "of its process resident at most",
    }
    said = f"{found[measured]:.3g} GB {parts[measured]}, " if measured else ""
    return f"{said}{found['estimated_memory']:.3g} GB estimated for state and a pass"


def skipped_line(summary: Mapping[str, Any]) -> str:
    """Format the number of steps that left the weights unchanged."""
    skipped = format_count(summary["steps_unchanged"], "skipped update", "skipped updates")
    return f"{skipped} in {summary['steps']} steps"


def groups_line(summary: Mapping[str, Any]) -> str:
    """Format the share of groups whose siblings agree and therefore teach nothing."""
    if not summary["groups_trained"]:
        return "-"
    names = {"all_right": "all right", "all_wrong": "all wrong", "no_variance": "no variance"}
    parts = [f"{text} {summary[f'groups_{name}']:.1%}" for name, text in names.items()]
    mixed = summary["groups_mixed_versions"]
    parts += [f"{mixed} with siblings of several versions"] if mixed else []
    return f"{summary['groups_trained']:,} trained: {', '.join(parts)}"


def length_line(found: Mapping[str, Any]) -> str:
    """Format the outcome of the training responses of one length class."""
    low, high, age = found["tokens_min"], found["tokens_max"], found["staleness_mean"]
    parts = [f"{found['trained']:,} trained"]
    parts += [f"staleness {age:.2f}"] if age is not None else []
    parts += [f"{count:,} dropped: {reason}" for reason, count in found["dropped"].items()]
    parts += [f"{found['unfinished']:,} of them unfinished"] if found["unfinished"] else []
    return f"{low:,}-{high:,} tokens: {', '.join(parts)}"


def range_line(found: Mapping[str, int]) -> str:
    """Format the first and last evaluation score of prompts of one length range."""
    low, high = found["prompt_tokens_min"], found["prompt_tokens_max"]
    tokens = f"{low}" if low == high else f"{low}-{high}"
    shares = (
        f"{found[f'{which}_correct'] / found[f'{which}_total']:.2f}"
        for which in ("first", "last")
        if found[f"{which}_total"]
    )
    return f"{tokens} tokens {' -> '.join(shares)} ({found['last_total']})"


def format_outcome(summary: Mapping[str, Any]) -> str:
    if summary["exit_code"] is None:
        return "not ended"
    if summary["paused"]:
        return "paused"
    if summary["exit_code"]:
        return f"FAILED (exit code {summary['exit_code']})"
    return "stopped early" if summary["interrupted"] else "complete"


def _format_evaluations(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the first and last evaluation; for a shaped reward, the mean score as well."""
    if not evaluations:
        yield "held-out right", "not evaluated"
        return
    ends = [evaluations[0], evaluations[-1]][: len(evaluations)]
    last = evaluations[-1]
    of = f"{last['total']} answers; ± is the standard error"
    yield "held-out right", f"{' -> '.join(map(format_accuracy, ends))} ({of})"
    if any(map(is_shaped, ends)):
        yield "held-out score", f"{' -> '.join(map(format_score, ends))} (mean)"
    if parts := format_details(last):
        yield "last evaluation", ", ".join(parts)


def _first_to_last(data: PageData, key: str) -> str:
    found = first_to_last(data, key)
    return "-" if found is None else f"{found[0]} ({found[1]})"


def first_to_last(data: PageData, key: str) -> tuple[str, str] | None:
    """Return a figure at both ends of a run, and a note on the steps averaged."""
    _, values = data.get_points(key)
    if not values:
        return None
    count = max(1, math.ceil(len(values) * ENDS_SHARE))
    first, last = (sum(part) / count for part in (values[:count], values[-count:]))
    of = "first and last step" if count == 1 else f"means of the first and last {count} steps"
    return f"{first:.3g} -> {last:.3g}", of


def _format_lengths(summary: Mapping[str, Any]) -> str:
    parts = []
    for what, key in (("trained", "response_length"), ("generated", "generated_response_length")):
        p50, p99 = summary[f"{key}_p50"], summary[f"{key}_p99"]
        if p50 is not None:
            parts.append(f"{what} p50 {p50:.0f}, p99 {p99:.0f}")
    return "; ".join(parts) or "-"


def _format_share(share: float | None, of: str) -> str:
    return "-" if share is None else f"{share:.2%} {of}"


def _format_throughput(summary: Mapping[str, Any]) -> str:
    rate, half = summary["tokens_per_s"], summary["tokens_per_s_ci95"]
    sure = "" if half is None else f" ± {half:,.3g} (95 % interval)"
    return "-" if rate is None else f"{rate:,.4g}{sure} tokens/s"


def _format_repack(found: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the lines about repack; none for a run without it."""
    if found is None:
        return
    late = f", {found['expired']} of them without an answer in time" if found["expired"] else ""
    yield (
        "repack",
        f"{found['policy']}: {format_count(found['replicas_emptied'], 'replica', 'replicas')} "
        "emptied"
        f"{late}, {format_count(found['moves'], 'trajectory', 'trajectories')} moved, "
        f"{found['tokens_prefilled_again']:,} tokens prefilled again",
    )
    if found["hand_over_s"]:
        whole, release = found["hand_over_s"], found["release_s"]
        yield (
            "  hand-over",
            f"mean {whole['mean']:.3g} s, max {whole['max']:.3g} s until all goes on elsewhere; "
            f"{release['mean']:.3g} s of it until it is let go",
        )
    if found["sooner_s"]:
        sooner = found["sooner_s"]
        yield (
            "  free sooner by",
            f"mean {sooner['mean']:.3g} s, together {sooner['sum']:.4g} s, at most",
        )


def _format_figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.4g} {unit}"


def _format_errors(summary: Mapping[str, Any]) -> str:
    reasons = summary["reward_errors"]
    by_reason = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    detail = f" ({by_reason})" if by_reason else ""
    return f"{sum(reasons.values())} of {summary['reward_answers']:,} answers{detail}"


def format_count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
