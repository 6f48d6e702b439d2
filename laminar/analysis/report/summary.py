"""Summary of a run: outcome, lengths and figures, in one JSON file.

Reads   the facts, timeline/, coordinator.json
Writes  RUN/summary.json (by rename); every key is explained in docs/metrics.md
Raises  ConfigError for a run directory that cannot be read

Everything is worked out again from the log and the processes' own record, nothing is carried over
from the live progress, so a report can be made of a killed run, of a running one, and twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.analysis.log import timeline
from laminar.analysis.log.intervals import Intervals, intersect_intervals, merge_intervals
from laminar.analysis.report import utilization
from laminar.analysis.report.confidence import estimate_mean
from laminar.analysis.report.figures import Row, RunFigures
from laminar.analysis.report.prompt_lengths import by_prompt_length, split_by_length
from laminar.config import ConfigError
from laminar.core.members.resumption import is_run_over
from laminar.core.state.evaluation_scores import describe_evaluation
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events.reasons import DropReason, RewardOutcome
from laminar.run.directory import COORDINATOR_FILE, STORE_FILE, SUMMARY_FILE
from laminar.run.renames import write_whole

RATE_PARTS = 20
"""Parts of the sampling time; the interval of the throughput is taken over their rates."""
LEFT_OUT_SHOWN = 32  #: most excluded replicas and versions listed; the log has all

MEMORY = (
    "perf/max_memory_allocated_gb", "perf/max_resident_gb", "perf/estimated_memory_gb",
)  # fmt: skip
"""Memory figures that a step reports: measured on a GPU, on a CPU, and the estimate."""
CONSTANT_SPREAD = 1e-6  #: scores that differ by no more are equal, as in training
CLASSES = 4  #: of response lengths


def summarize_run(run_dir: Path) -> dict[str, Any]:
    """Compute the summary and write it to RUN/summary.json."""
    summary = summary_of(run_dir)
    write_summary(run_dir, summary)
    return summary


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Compute the summary without writing it."""
    return summarize_figures(RunFigures(run_dir))


def summarize_figures(run: RunFigures) -> dict[str, Any]:
    state = run.state
    loads = run.facts.table("loads", ["probe_kl"])["probe_kl"].drop_null().to_pylist()
    return {
        **_summarize_outcome(state),
        "weight_versions": len(run.published_ns),
        "coordinator_incarnations": run.coordinators,
        **_summarize_unchanged(run),
        **_summarize_lengths(run),
        "probe_kl_mean": fmean(loads) if loads else None,
        **group_figures(run),
        "by_length": by_length(run.training),
        "lost_by": run.lost_by,
        "warnings": state.signals.warnings,
        **_summarize_rewards(run),
        "calls": _summarize_calls(run),
        "eval_by_prompt_length": by_prompt_length(
            run.run_dir,
            state.evaluations.results,
            {row["trajectory"]: row["correct"] for row in run.trajectories},
        ),
        "seed": state.settings.seed,
        **_compute_throughput(run.steps.values()),
        "nearly_empty_steps": utilization.nearly_empty_share(run.steps, run.slots),
        **_summarize_use(run),
        **_summarize_latency(run),
        "repack": _summarize_repack(run),
        **_summarize_timing(run),
        "timelines_cut": run.cut,
        "processes": _read_pids(run.run_dir, state),
        "seconds": run.facts.seconds,
        "events": run.facts.events - run.facts.begins_at,
        "begins_at": run.facts.begins_at,
    }


def _summarize_origin(state: State) -> dict[str, Any] | None:
    """Return the origin of a fork; None for another run."""
    origin = state.data.origin
    if origin is None:
        return None
    kept = ("run", "step", "version", "digest")
    return {name: getattr(origin, name) for name in kept} | {"same_data": bool(origin.data)}


def _summarize_outcome(state: State) -> dict[str, Any]:
    """Return the outcome of the run, from the state at its end."""
    evaluations = [describe_evaluation(result) for result in state.evaluations.results]
    results = [result["share"] for result in evaluations]
    trained = state.work.ledger.trajectories.trained
    return {
        "exit_code": state.run.exit_code if state.run.phase == Phase.ENDED else None,
        "failure": state.run.failure,
        "failure_kind": state.run.failed.kind if state.run.failed is not None else None,
        "remedy": state.run.failed.kind.record.remedy if state.run.failed is not None else None,
        "interrupted": state.run.draining and not (state.run.drain_failure or state.run.paused),
        "paused": state.run.paused,
        "resumable": state.settings.keeps_checkpoints and not is_run_over(state),
        "forked_from": _summarize_origin(state),
        "steps": state.steps.completed - state.data.first_step,
        "eval_first": results[0] if results else None,
        "eval_last": results[-1] if results else None,
        "evaluations": evaluations,
        "staleness_mean": state.steps.staleness_sum / trained if trained else 0.0,
        "staleness_max": state.steps.staleness_max,
        "trajectories_trained": trained,
        "groups_dropped": dict(state.work.ledger.groups.dropped),
        "trajectories_left_out": state.work.ledger.trajectories.dropped.get(DropReason.MISMATCH, 0),
        "tokens_restarted": state.work.ledger.tokens.dropped.get("restarted", 0),
    }


def _summarize_unchanged(run: RunFigures) -> dict[str, Any]:
    """Count the steps that left the weights unchanged, by reason."""
    reasons = Counter(row["reason"] for row in run.completed if not row["changed"])
    return {"steps_unchanged": reasons.total(), "steps_unchanged_by": dict(reasons)}


def _summarize_lengths(run: RunFigures) -> dict[str, Any]:
    """Return percentiles of the trained and of the generated response lengths, in tokens."""
    trained = run.trained
    cut = Counter(row["truncated_by"] for row in trained if row["truncated_by"])
    generated = [row["tokens"] for row in run.generated]
    return {
        **_compute_percentiles("response_length", [row["tokens"] for row in trained]),
        **_compute_percentiles("generated_response_length", generated),
        "truncated_share": cut.total() / len(trained) if trained else None,
        "truncated_by": {reason: count / len(trained) for reason, count in cut.most_common()},
        "mismatch_kl_mean": _compute_mismatch(run),
        "left_out": _left_out(run),
        "trainer_memory_gb": _summarize_memory(run),
    }


def _summarize_rewards(run: RunFigures) -> dict[str, Any]:
    """Return the outcome of scoring; logs of older releases are counted by their events."""
    counted = run.state.signals.rewards
    reasons = Counter(row["reward_reason"] for row in run.trajectories if row["reward_reason"])
    failed = {reason: n for reason, n in reasons.items() if reason != RewardOutcome.OK}
    return {
        "reward_answers": counted.answers if counted else reasons.total(),
        "reward_errors": dict(counted.errors) if counted else failed,
        "reward_error_first": counted.first if counted else "",
    }


def _summarize_calls(run: RunFigures) -> dict[str, Any] | None:
    """Return the cost of the calls, None without an environment; seconds are of finished calls."""
    if not run.state.settings.has_environment or not (run.run_dir / STORE_FILE).is_file():
        return None
    calls = run.facts.rows("tool_calls", ["status", "seconds"])
    seconds = [row["seconds"] for row in calls if row["status"] not in ("intended", "lost")]
    p50, p99 = np.percentile(seconds, [50, 99]).tolist() if seconds else (None, None)
    columns = ["prompt_tokens", "tokens_resumed", "started"]
    resumed = [row for row in run.facts.rows("placements", columns) if row["tokens_resumed"]]
    ended_by = Counter(row["ended_by"] for row in run.trajectories if row["ended_by"])
    return {
        "made": len(calls),
        "by_end": dict(Counter(row["status"] for row in calls)),
        "seconds_p50": p50,
        "seconds_p99": p99,
        "turns_continued": sum(row["turns"] - 1 for row in run.trajectories),
        "tokens_read_again": sum(
            (row["prompt_tokens"] or 0) + row["tokens_resumed"] for row in resumed
        ),
        "ended_by": dict(ended_by),
    }


def _summarize_use(run: RunFigures) -> dict[str, Any]:
    """Return means over all gauges, and the cache use per replica; None without data."""
    uses = {name: _mean(gauges.kv_use) for name, gauges in run.gauges.items()}
    empty, found = np.zeros(0), run.gauges.values()
    return {
        "kv_use_mean": _mean(np.concatenate([empty, *(gauges.kv_use for gauges in found)])),
        "kv_use": {name: use for name, use in uses.items() if use is not None},
        "running_mean": _mean(np.concatenate([empty, *(gauges.running for gauges in found)])),
        "waiting_mean": _mean(np.concatenate([empty, *(gauges.waiting for gauges in found)])),
    }


def _mean(values: NDArray[Any]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _summarize_latency(run: RunFigures) -> dict[str, Any]:
    """Return latencies of training responses, from the first placement to the last token."""
    took = [row["finished"] - row["dispatched"] for row in run.generated]
    return {
        "latency_s_mean": sum(took) / len(took) if took else None,
        "latency_s_max": max(took, default=0.0),
    }


def _summarize_repack(run: RunFigures) -> dict[str, Any] | None:
    """Return what repack did, None for a run without it.

    A replica is freed when everything that it gave away has started elsewhere or has ended. Without
    repack it would have run until the last of those trajectories finished, so its gain is measured
    up to the moment when the last of them finishes at the destination. There it runs in a larger
    batch than it would have had, so this figure is an upper bound."""
    policy = run.state.settings.repack_policy
    if not policy:
        return None
    found = run.facts.rows("migrations")
    freed = [row for row in found if row["freed"] is not None]
    sooner = [max(row["done"] - row["freed"], 0.0) for row in freed if row["done"] is not None]
    return {
        "policy": policy,
        "replicas_emptied": len(found),
        "replicas_freed": len(freed),
        "moves": sum(row["moved"] for row in found),
        "expired": sum(row["expired"] for row in found),
        "tokens_prefilled_again": sum(row["tokens_prefilled"] for row in found),
        "release_s": _summarize_seconds([row["placed"] - row["ordered"] for row in freed]),
        "hand_over_s": _summarize_seconds([row["freed"] - row["ordered"] for row in freed]),
        "sooner_s": _summarize_seconds(sooner),
    }


def _summarize_seconds(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"mean": sum(seconds) / len(seconds), "max": max(seconds), "sum": sum(seconds)}


def _compute_percentiles(name: str, values: list[int]) -> dict[str, float | None]:
    return {f"{name}_p{q}": float(np.percentile(values, q)) if values else None for q in (50, 99)}


def _left_out(run: RunFigures) -> list[dict[str, Any]]:
    """Return the first replicas and versions whose rows were excluded from training."""
    return [
        {"step": row["step"], **part, "trajectories": len(part["trajectories"])}
        for row in run.completed
        for part in json.loads(row["left_out"] or "[]")
    ][:LEFT_OUT_SHOWN]


def _list_metrics(run: RunFigures) -> list[tuple[dict[str, float], int]]:
    """Return the figures and response tokens of each step."""
    return [(json.loads(row["metrics"]), row["tokens"]) for row in run.completed]


def _compute_mismatch(run: RunFigures) -> float | None:
    """Return the mean over tokens: each step is weighted by its response tokens."""
    key = "mismatch_kl/mean"
    chosen = [(metrics[key], n) for metrics, n in _list_metrics(run) if key in metrics]
    tokens = sum(count for _, count in chosen)
    return sum(value * count for value, count in chosen) / tokens if tokens else None


def _summarize_memory(run: RunFigures) -> dict[str, float] | None:
    """Return the highest value of each memory figure that a step reported."""
    found: dict[str, float] = {}
    for metrics, _ in _list_metrics(run):
        for key in MEMORY:
            name = key.removeprefix("perf/").removesuffix("_gb")
            if key in metrics:
                found[name] = max(found.get(name, 0.0), metrics[key])
    return found or None


def _compute_throughput(steps: Iterable[timeline.Steps]) -> dict[str, float | None]:
    """Return the throughput, with an error over parts long enough to be independent."""
    rates = estimate_mean(token_rates(steps, RATE_PARTS))
    return {
        "tokens_per_s": rates.mean if rates else None,
        "tokens_per_s_ci95": rates.half if rates else None,
    }


def token_rates(steps: Iterable[timeline.Steps], parts: int) -> list[float]:
    """Return sampled tokens per second in equal parts of the engines' time; empty without steps."""
    rows = timeline.merge_rows(steps)
    if not len(rows) or rows[:, 1].max() == rows[:, 0].min():
        return []
    begin, end = int(rows[:, 0].min()), int(rows[:, 1].max())
    place = (rows[:, 1] - begin) * parts // (end - begin)
    tokens = np.bincount(np.minimum(place, parts - 1), weights=rows[:, 3], minlength=parts)
    rates: list[float] = (tokens * parts * 1e9 / (end - begin)).tolist()
    return rates


# --- times ------------------------------------------------------------------------------------


def _summarize_timing(run: RunFigures) -> dict[str, Any]:
    held, steps = run.conditions.get_intervals, run.steps
    trainer_spans = [span for spans in run.trainers.values() for span in spans]
    phases = (f"phase-{phase}" for phase in (Phase.STARTING, Phase.RUNNING))
    working = merge_intervals(np.concatenate([held(phase) for phase in phases]))
    time_shares, pulling = {}, {}
    for name, spans in run.trainers.items():
        covered = _find_covered(name in run.cut, spans)
        time_shares[name] = utilization.trainer_shares(
            intersect_intervals(held("live", name), covered),
            spans,
            held("trainer-free"),
            held(f"phase-{Phase.FINAL_EVALUATION}"),
            working,
        )
    for name, spans in run.pulls.items():
        pulling[name] = timeline.select_state(spans, "pulling")
        time_shares[name] = utilization.replica_shares(
            held("live", name),
            timeline.merge_steps([steps[name]]),
            held("spare", name),
            merge_intervals(np.concatenate([pulling[name], held("loading", name)])),
            held("bound", name),
        )
    return {
        "overlap": utilization.compute_overlap(
            timeline.select_state(trainer_spans, "busy"),
            held("bound"),
            timeline.merge_steps(steps.values()),
        ),
        "decode_gap_ratio": utilization.decode_gap_ratio(
            steps,
            {name: held("running", name) for name in steps},
            _find_publishes(trainer_spans, run.published_ns),
            pulling,
        ),
        "publish_stall_share": _publish_stall(run, trainer_spans),
        "time_shares": time_shares,
    }


def _find_covered(cut: bool, spans: list[timeline.TimelineSpan]) -> Intervals:
    """Return the time covered by a process's spans."""
    first_ns = min((span.start_ns for span in spans), default=0) if cut else 0
    return merge_intervals([(first_ns, np.iinfo(np.int64).max)])


def _find_publishes(spans: list[timeline.TimelineSpan], published_ns: dict[int, int]) -> Intervals:
    """Return the times from the copy into the slot to the relay's report of a complete version."""
    return merge_intervals(
        (span.start_ns, max(span.end_ns, published_ns.get(span.version, 0)))
        for span in spans
        if span.state == "publishing"
    )


def _publish_stall(run: RunFigures, spans: list[timeline.TimelineSpan]) -> float | None:
    """Compute the stall over the trained steps whose weights were published, deferred included."""
    received = {span.step + 1: span.start_ns for span in spans if span.state == "busy"}
    publishes = {
        row["step"]: (received[row["step"]], run.published_ns[row["version"]])
        for row in run.steps_trained
        if row["step"] in received and row["version"] in run.published_ns
    }
    stalls = merge_intervals(
        (span.start_ns, span.end_ns)
        for span in spans  # weights are named by the number of steps that made them
        if span.state == "publishing" and span.step in publishes
    )
    return utilization.publish_stall_share(stalls, list(publishes.values()))


# --- the file ---------------------------------------------------------------------------------


def _read_pids(run_dir: Path, state: State) -> dict[str, int | None]:
    """Return the process id of each process's latest start, by name."""
    try:
        coordinator = json.loads((run_dir / COORDINATOR_FILE).read_text()).get("pid")
    except (OSError, ValueError, AttributeError):
        coordinator = None
    return {"coordinator": coordinator} | {a.name: a.pid for a in state.members.actors.values()}


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write the summary; raise ConfigError if that fails."""
    replace_text(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically; raise ConfigError if that fails."""
    try:
        write_whole(path, text.encode(), durable=False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def group_figures(run: RunFigures) -> dict[str, Any]:
    """Return shares of the trained groups; groups whose siblings agree teach nothing."""
    groups: dict[str, list[Row]] = {}
    for row in run.trained:
        groups.setdefault(row["group_id"], []).append(row)
    mixed = run.facts.table("groups", ["group_id", "mixed"]).to_pylist()
    count = len(groups)
    right = sum(all(row["correct"] for row in group) for group in groups.values())
    wrong = sum(not any(row["correct"] for row in group) for group in groups.values())
    flat = sum(_compute_spread(group) <= CONSTANT_SPREAD for group in groups.values())
    return {
        "groups_trained": count,
        "groups_mixed_versions": sum(row["mixed"] and row["group_id"] in groups for row in mixed),
        "groups_all_right": right / count if count else None,
        "groups_all_wrong": wrong / count if count else None,
        "groups_no_variance": flat / count if count else None,
    }


def _compute_spread(group: list[Row]) -> float:
    scores = [row["reward"] for row in group]
    return float(max(scores) - min(scores))


def by_length(closed: list[Row]) -> list[dict[str, Any]]:
    """Return figures of the ended training responses, in length classes of about equal size.

    Bias towards short responses shows by length first: in the share trained, the share dropped, the
    share left over at the end, and the staleness of the long ones. Responses dropped before they
    finished are classed by the tokens they had.
    """
    parts = split_by_length(closed, lambda row: int(row["tokens"]), CLASSES)
    return [_summarize_class(part) for part in parts]


def _summarize_class(closed: list[Row]) -> dict[str, Any]:
    trained = [row for row in closed if row["outcome"] == "trained"]
    reasons = Counter(row["outcome_reason"] for row in closed if row["outcome"] == "dropped")
    ages = [row["staleness"] for row in trained]
    return {
        "tokens_min": min(row["tokens"] for row in closed),
        "tokens_max": max(row["tokens"] for row in closed),
        "trained": len(trained),
        "staleness_mean": sum(ages) / len(ages) if ages else None,
        "truncated": sum(row["truncated_by"] is not None for row in closed),
        "dropped": dict(sorted(reasons.items())),
        "unfinished": sum(row["finished"] is None for row in closed),
    }
