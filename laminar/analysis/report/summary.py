"""Summary of a run: outcome, lengths and figures, in one JSON file.

Reads   the event log, timeline/, coordinator.json
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

import msgspec
import numpy as np

from laminar.analysis.audit.ledger_book import TRUNCATED, Account, ClosedTrajectory
from laminar.analysis.log import timeline
from laminar.analysis.log.engine_use import EngineUse
from laminar.analysis.log.intervals import Intervals, intersect_intervals, merge_intervals
from laminar.analysis.log.run_log import WallClock, replay_log
from laminar.analysis.log.state_intervals import StateIntervals
from laminar.analysis.log.tool_calls import ToolCallStats
from laminar.analysis.report import utilization
from laminar.analysis.report.confidence import estimate_mean
from laminar.analysis.report.prompt_lengths import by_prompt_length, split_by_length
from laminar.analysis.report.repack_book import LatencyStats
from laminar.analysis.report.utilization import PublishTiming
from laminar.config import ConfigError
from laminar.core.members.resumption import is_run_over
from laminar.core.state.evaluation_scores import describe_evaluation
from laminar.core.state.process_failures import ProcessFailures
from laminar.core.state.scores import float_of
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.reasons import DropReason, RewardOutcome
from laminar.names.ids import Purpose, TrajectoryId
from laminar.run.directory import COORDINATOR_FILE, SUMMARY_FILE
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


class Milestones:
    """Replay observer of counts and times that neither the state nor Account holds."""

    def __init__(self) -> None:
        self.coordinators = 0
        self.published_ns: dict[int, int] = {}  #: by version
        self.completed: dict[int, tuple[int, int]] = {}  #: time and response tokens, by step index
        self.names: dict[str, list[str]] = {}  #: processes that became ready, by role
        self.slots: dict[str, int] = {}  #: sequences that an engine runs at a time, by replica
        self.losses = ProcessFailures()
        self.probe_kls: list[float] = []
        self._clock = WallClock()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self.losses.record_event(stamped, commands)
        now, event = self._clock.unix_ns(stamped), stamped.event
        if isinstance(event, ev.CoordinatorStarted):
            self.coordinators += 1
        elif isinstance(event, ev.WeightsPublished):
            self.published_ns.setdefault(event.version, now)
        elif isinstance(event, ev.StepCompleted):
            self.completed.setdefault(event.step_index, (now, event.num_tokens))
        elif isinstance(event, ev.WeightsLoaded) and event.probe_kl is not None:
            self.probe_kls.append(event.probe_kl)
        elif isinstance(event, ev.TrainerReady | ev.ReplicaReady):
            role = "trainer" if isinstance(event, ev.TrainerReady) else "rollout"
            names = self.names.setdefault(role, [])
            if stamped.peer not in names:
                names.append(stamped.peer)
        if isinstance(event, ev.ReplicaReady):  # one more group, which waits for slots, is included
            self.slots[stamped.peer] = event.max_num_seqs - state.settings.group_size


def summarize_run(run_dir: Path) -> dict[str, Any]:
    """Compute the summary and write it to RUN/summary.json."""
    summary = summary_of(run_dir)
    write_summary(run_dir, summary)
    return summary


class RunReplay:
    """Replay of a run for all figures, with the timelines of its processes."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.account, self.windows, self.milestones = Account(), StateIntervals(), Milestones()
        self.use, self.course, self.calls = EngineUse(), LatencyStats(), ToolCallStats()
        observers = self.account, self.windows, self.milestones, self.use, self.course, self.calls
        replayed = replay_log(run_dir, *observers)
        self.state, self.events = replayed.machine.state, replayed.events
        names = self.milestones.names
        replicas = sorted(names.get("rollout", []))
        self.trainers = {
            name: timeline.read_spans(run_dir, name) for name in names.get("trainer", [])
        }
        self.pulls = {name: timeline.read_spans(run_dir, name) for name in replicas}
        self.steps = {name: timeline.read_steps(run_dir, name) for name in replicas}
        self.cut = timeline.cut_timelines(run_dir)  #: processes whose first spans were removed


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Compute the summary without writing it."""
    return summarize_replay(RunReplay(run_dir))


def summarize_replay(run: RunReplay) -> dict[str, Any]:
    state, account, milestones = run.state, run.account, run.milestones
    return {
        **_summarize_outcome(state, milestones),
        **_summarize_unchanged(account),
        **_summarize_lengths(account),
        "probe_kl_mean": fmean(milestones.probe_kls) if milestones.probe_kls else None,
        **group_figures(account),
        "by_length": by_length(account),
        "lost_by": milestones.losses.why,
        "warnings": state.signals.warnings,
        **_summarize_rewards(state, account),
        "calls": run.calls.compute_summary(run.run_dir),
        "eval_by_prompt_length": by_prompt_length(
            run.run_dir, state.evaluations.results, account.rewarded
        ),
        "seed": state.settings.seed,
        **_compute_throughput(run.steps.values()),
        "nearly_empty_steps": utilization.nearly_empty_share(run.steps, milestones.slots),
        **run.use.compute_summary(),
        **run.course.compute_summary(),
        **_summarize_timing(run),
        "timelines_cut": run.cut,
        "processes": _read_pids(run.run_dir, state),
        "seconds": (run.windows.last_ns - run.windows.first_ns) / 1e9,
        "events": run.events,
    }


def _summarize_origin(state: State) -> dict[str, Any] | None:
    """Return the origin of a fork; None for another run."""
    origin = state.data.origin
    if origin is None:
        return None
    kept = ("run", "step", "version", "digest")
    return {name: getattr(origin, name) for name in kept} | {"same_data": bool(origin.data)}


def _summarize_outcome(state: State, milestones: Milestones) -> dict[str, Any]:
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
        "weight_versions": len(milestones.published_ns),
        "staleness_mean": state.steps.staleness_sum / trained if trained else 0.0,
        "staleness_max": state.steps.staleness_max,
        "trajectories_trained": trained,
        "groups_dropped": dict(state.work.ledger.groups.dropped),
        "trajectories_left_out": state.work.ledger.trajectories.dropped.get(DropReason.MISMATCH, 0),
        "tokens_restarted": state.work.ledger.tokens.dropped.get("restarted", 0),
        "coordinator_incarnations": milestones.coordinators,
    }


def _summarize_unchanged(account: Account) -> dict[str, Any]:
    """Count the steps that left the weights unchanged, by reason."""
    reports = [step.completed for step in account.steps.values()]
    reasons = Counter(report.reason for report in reports if report and not report.changed)
    return {"steps_unchanged": reasons.total(), "steps_unchanged_by": dict(reasons)}


def _summarize_lengths(account: Account) -> dict[str, Any]:
    """Return percentiles of the trained and of the generated response lengths, in tokens."""
    trained = [c for c in account.closed.values() if c.ending.end == "trained"]
    names = [closed.ending.trajectory_id for closed in trained]
    cut = Counter(reason for name in names if (reason := _truncated_by(account, name)))
    generated = [
        finished.num_tokens
        for name, finished in account.finished.items()
        if account.issued[name] == Purpose.TRAIN
    ]
    return {
        **_compute_percentiles("response_length", [c.num_tokens for c in trained]),
        **_compute_percentiles("generated_response_length", generated),
        "truncated_share": cut.total() / len(names) if names else None,
        "truncated_by": {reason: count / len(names) for reason, count in cut.most_common()},
        "mismatch_kl_mean": _compute_mismatch(account),
        "left_out": _left_out(account),
        "trainer_memory_gb": _summarize_memory(account),
    }


def _truncated_by(account: Account, name: TrajectoryId) -> str:
    """Return the limit that truncated a response: of the environment, else the engine's; or ""."""
    rewarded, finished = account.rewarded.get(name), account.finished.get(name)
    if rewarded is not None and rewarded.ended_by:
        return rewarded.ended_by
    return TRUNCATED if finished is not None and finished.finish_reason == TRUNCATED else ""


def _summarize_rewards(state: State, account: Account) -> dict[str, Any]:
    """Return the outcome of scoring; logs of older releases are counted by their events."""
    counted = state.signals.rewards
    reasons = Counter(event.reason for event in account.rewarded.values())
    failed = {reason: n for reason, n in reasons.items() if reason != RewardOutcome.OK}
    return {
        "reward_answers": counted.answers if counted else reasons.total(),
        "reward_errors": dict(counted.errors) if counted else failed,
        "reward_error_first": counted.first if counted else "",
    }


def _compute_percentiles(name: str, values: list[int]) -> dict[str, float | None]:
    return {f"{name}_p{q}": float(np.percentile(values, q)) if values else None for q in (50, 99)}


def _left_out(account: Account) -> list[dict[str, Any]]:
    """Return the first replicas and versions whose rows were excluded from training."""
    return [
        {"step": number + 1, **msgspec.to_builtins(part), "trajectories": len(part.trajectories)}
        for number, step in account.steps.items()
        if step.completed is not None
        for part in step.completed.left_out
    ][:LEFT_OUT_SHOWN]


def _compute_mismatch(account: Account) -> float | None:
    """Return the mean over tokens: each step is weighted by its response tokens."""
    reports = [s.completed for s in account.steps.values() if s.completed is not None]
    chosen = [r for r in reports if "mismatch_kl/mean" in r.metrics]
    tokens = sum(r.num_tokens for r in chosen)
    total = sum(r.metrics["mismatch_kl/mean"] * r.num_tokens for r in chosen)
    return total / tokens if tokens else None


def _summarize_memory(account: Account) -> dict[str, float] | None:
    """Return the highest value of each memory figure that a step reported."""
    found: dict[str, float] = {}
    for step in account.steps.values():
        metrics = step.completed.metrics if step.completed is not None else {}
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
    rows = np.concatenate([np.zeros((0, 4), dtype=np.int64), *steps])
    if not len(rows) or rows[:, 1].max() == rows[:, 0].min():
        return []
    begin, end = int(rows[:, 0].min()), int(rows[:, 1].max())
    place = (rows[:, 1] - begin) * parts // (end - begin)
    tokens = np.bincount(np.minimum(place, parts - 1), weights=rows[:, 3], minlength=parts)
    rates: list[float] = (tokens * parts * 1e9 / (end - begin)).tolist()
    return rates


# --- times ------------------------------------------------------------------------------------


def _trainer_shares(run: RunReplay) -> dict[str, dict[str, float]]:
    windows = run.windows
    working = merge_intervals(
        np.concatenate([windows["phase", p] for p in (Phase.STARTING, Phase.RUNNING)])
    )
    return {
        name: utilization.trainer_shares(
            intersect_intervals(windows["live", name], _find_covered(name in run.cut, spans)),
            spans,
            windows["trainer-free",],
            windows["phase", Phase.FINAL_EVALUATION],
            working,
        )
        for name, spans in run.trainers.items()
    }


def _summarize_timing(run: RunReplay) -> dict[str, Any]:
    windows, steps = run.windows, run.steps
    trainer_spans = [span for spans in run.trainers.values() for span in spans]
    time_shares = _trainer_shares(run)
    pulling = {name: timeline.select_state(spans, "pulling") for name, spans in run.pulls.items()}
    for name in steps:
        time_shares[name] = utilization.replica_shares(
            windows["live", name],
            timeline.merge_steps([steps[name]]),
            windows["spare", name],
            merge_intervals(np.concatenate([pulling[name], windows["loading", name]])),
            windows["bound", name],
        )
    return {
        "overlap": utilization.compute_overlap(
            timeline.select_state(trainer_spans, "busy"),
            windows["bound",],
            timeline.merge_steps(steps.values()),
        ),
        "decode_gap_ratio": utilization.decode_gap_ratio(
            steps,
            {name: windows["running", name] for name in steps},
            publish_windows(trainer_spans, run.milestones.published_ns),
            pulling,
        ),
        "publish_stall_share": _publish_stall(run, trainer_spans),
        "time_shares": time_shares,
    }


def _find_covered(cut: bool, spans: list[timeline.TimelineSpan]) -> Intervals:
    """Return the time covered by a process's spans."""
    first_ns = min((span.start_ns for span in spans), default=0) if cut else 0
    return merge_intervals([(first_ns, np.iinfo(np.int64).max)])


def publish_windows(spans: list[timeline.TimelineSpan], published_ns: dict[int, int]) -> Intervals:
    """Return the times from the copy into the slot to the relay's report of a complete version."""
    return merge_intervals(
        (span.start_ns, max(span.end_ns, published_ns.get(span.version, 0)))
        for span in spans
        if span.state == "publishing"
    )


def _publish_stall(run: RunReplay, spans: list[timeline.TimelineSpan]) -> float | None:
    """Compute the stall over the trained steps whose weights were published, deferred included."""
    received = {span.step: span.start_ns for span in spans if span.state == "busy"}
    publishes, made_by = [], set()
    for index, step in run.account.steps.items():
        published = run.milestones.published_ns.get(step.command.version)
        if published is not None and index in received:
            publishes.append(PublishTiming(received[index], published))
            made_by.add(index + 1)  # weights are named by the number of steps that made them
    stalls = merge_intervals(
        (span.start_ns, span.end_ns)
        for span in spans
        if span.state == "publishing" and span.step in made_by
    )
    return utilization.publish_stall_share(stalls, publishes)


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


def group_figures(account: Account) -> dict[str, Any]:
    """Return shares of the trained groups; groups whose siblings agree teach nothing."""
    groups: dict[str, list[tuple[float, bool]]] = {}
    for name, closed in account.closed.items():
        if closed.ending.end == "trained":
            event = account.rewarded[name]
            scored = (float_of(event.reward_bits), event.correct)
            groups.setdefault(closed.ending.group, []).append(scored)
    count = len(groups)
    right = sum(all(correct for _, correct in group) for group in groups.values())
    wrong = sum(not any(correct for _, correct in group) for group in groups.values())
    flat = sum(_compute_spread(group) <= CONSTANT_SPREAD for group in groups.values())
    return {
        "groups_trained": count,
        "groups_mixed_versions": len(account.mixed & groups.keys()),
        "groups_all_right": right / count if count else None,
        "groups_all_wrong": wrong / count if count else None,
        "groups_no_variance": flat / count if count else None,
    }


def _compute_spread(group: list[tuple[float, bool]]) -> float:
    scores = [score for score, _ in group]
    return max(scores) - min(scores)


def by_length(account: Account) -> list[dict[str, Any]]:
    """Return figures of the ended training responses, in length classes of about equal size.

    Bias towards short responses shows by length first: in the share trained, the share dropped, the
    share left over at the end, and the staleness of the long ones. Responses dropped before they
    finished are classed by the tokens they had.
    """
    closed = [c for name, c in account.closed.items() if account.issued[name] == Purpose.TRAIN]
    parts = split_by_length(closed, lambda c: c.num_tokens, CLASSES)
    return [_summarize_class(account, part) for part in parts]


def _summarize_class(account: Account, closed: list[ClosedTrajectory]) -> dict[str, Any]:
    trained = [c for c in closed if c.ending.end == "trained"]
    dropped = [c for c in closed if c.ending.end == "dropped"]
    reasons = Counter(c.ending.reason for c in dropped)
    ages = [account.compute_staleness(c) for c in trained]
    finished = [account.finished.get(c.ending.trajectory_id) for c in closed]
    return {
        "tokens_min": min(c.num_tokens for c in closed),
        "tokens_max": max(c.num_tokens for c in closed),
        "trained": len(trained),
        "staleness_mean": sum(ages) / len(ages) if ages else None,
        "truncated": sum(bool(_truncated_by(account, c.ending.trajectory_id)) for c in closed),
        "dropped": dict(sorted(reasons.items())),
        "unfinished": sum(found is None for found in finished),
    }
