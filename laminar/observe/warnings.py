"""Warnings about training that a user should see while the run works.

Reads   every event and the state after it; first_look.json, found before the run started; the
        figures of earlier steps, after a restart
Gives   WarningMonitor, an observer that hands TrainingWarning events to the coordinator to log

Warnings cause no decisions, and nothing in the core depends on them: the state only remembers which
kinds were given, so that each is given once per run, also across restarts of the coordinator. Each
has a figure, the limit it exceeded, and what to check.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, median

from laminar.core.state.evaluation_scores import describe_evaluation
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.events.reasons import DropReason, EndedBy, FinishReason
from laminar.run.directory import FIRST_LOOK_FILE

WINDOW = 5  #: steps over which a batch's figures are averaged
ENDS_WINDOW = 3  #: the same for the ends of responses, which vary little
ANSWERS_MIN = 64  #: minimum number of responses for a share of failed ones
ERRORS_SHARE = 0.05
FLAT_SHARE = 0.9  #: share of the groups with equal rewards for all siblings
TRUNCATED_SHARE = 0.5
TIMEOUT_SHARE = 0.1  #: share of the responses ended by a timeout of their tools
TIMEOUTS = (EndedBy.TOOL_TIMEOUT, EndedBy.TURN_TIMEOUT, EndedBy.TRAJECTORY_TIMEOUT)
DROPPED_SHARE, DROPPED_MIN = 0.1, 5  #: dropped groups, as a share of the ended ones, and at least
DROPPED_AS_PLANNED = {
    *(DropReason.NO_VARIANCE, DropReason.END_OF_DATA, DropReason.RUN_ENDED),
    *(DropReason.REPLICA_LOST, DropReason.VERSION_MISSING),  # of evaluations
}
LIMITS: dict[str, str] = {
    FinishReason.LENGTH: "data.max_response_length",
    EndedBy.MAX_TURNS: "env.max_turns",
    EndedBy.CONTEXT_FULL: "env.max_context_tokens",
    EndedBy.TOOL_TIMEOUT: "env.tool_timeout_s",
    EndedBy.TURN_TIMEOUT: "env.turn_timeout_s",
    EndedBy.TRAJECTORY_TIMEOUT: "env.trajectory_timeout_s",
}
"""The setting whose limit truncates a response, by reason."""
ENTROPY_SHARE = 0.1  #: share of the entropy in the first steps
UNIFORM_SHARE = 0.9  #: share of the entropy of the uniform distribution
NONFINITE_ROW = 3  #: updates without a finite gradient, in a row
MISMATCH_NATS, MISMATCH_GROWTH = 0.2, 5.0  #: mean k3, and its ratio to the median of earlier steps
FALL_ERRORS = 3.0  #: standard errors of the difference of two evaluations

DEAD_EXPERTS = "actor/router_load/dead"
MISMATCH, ENTROPY, REWARD = "mismatch_kl/mean", "actor/entropy", "reward/mean"
KL, RATE, ROUNDING = "actor/kl_loss", "actor/lr", 1e-6
KL_NOISE = 3e-7  #: ten times the rounding of an estimate of one token, nats
Figures = dict[str, float]


class WarningMonitor:
    """Observer of all events; passes warnings to `report`."""

    def __init__(self, report: Callable[[Event], None], at_start: Mapping[str, str] = {}) -> None:
        """Create the monitor; `at_start`: texts of warnings from before the run, by kind."""
        self._report = report
        self._at_start = dict(at_start)
        self._recent: deque[Figures] = deque(maxlen=WINDOW)
        self._first: list[Figures] = []
        self._mismatches: list[float] = []  #: of all steps
        self._rates: list[float] = []  #: learning rates of all steps
        self._changed: set[int] = set()  #: versions of steps that changed the weights
        self._published: deque[tuple[int, str]] = deque(maxlen=3)  #: last versions with digests
        self._probe_kls: dict[str, float] = {}  #: of the last load of each replica
        self._evaluations = 0
        self._given: set[str] = set()  #: reported already; applied in a later turn

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if isinstance(stamped.event, ev.StepCompleted):
            self.take_figures(stamped.event.metrics)
        if state.run.phase == Phase.ENDED:
            return
        for kind, text in self._find_warnings(stamped, state):
            if kind not in state.signals.warnings and kind not in self._given:
                self._given.add(kind)
                step = state.steps.completed
                self._report(ev.TrainingWarning(kind=kind, step=step, text=text))

    def take_figures(self, figures: Figures) -> None:
        """Take the figures of a completed step; after a restart, earlier ones first."""
        self._recent.append(figures)
        if len(self._first) < WINDOW:
            self._first.append(figures)
        if isfinite(mismatch := figures.get(MISMATCH, nan)):
            self._mismatches.append(mismatch)
        if RATE in figures:
            self._rates.append(figures[RATE])

    def _find_warnings(self, stamped: Stamped, state: State) -> Iterator[tuple[str, str]]:
        """Find kind and text of each present problem, at the events that can reveal it."""
        event = stamped.event
        at_start, self._at_start = self._at_start, {}
        yield from at_start.items()
        if isinstance(event, ev.DataLoaded):
            yield from _few_prompts(state)
        elif isinstance(event, ev.WeightsRejected):
            yield "weights", _describe_rejected(event)
        elif isinstance(event, ev.WeightsLoaded) and event.probe_kl is not None:
            self._probe_kls[stamped.peer] = event.probe_kl
        elif isinstance(event, ev.WeightsPublished):
            self._published.append((event.version, event.digest))
            yield from self._check_published()
        elif isinstance(event, ev.TrajectoryRewarded | ev.TrajectoryFailed):
            yield from _reward_errors(state)
        elif isinstance(event, ev.StepCompleted):
            self._changed |= {event.version} if event.changed else set()
            yield from _check_mismatch(event)
            yield from _prompts_differ(event)
            yield from self._check_step(state)
        if len(state.evaluations.results) > self._evaluations:
            self._evaluations = len(state.evaluations.results)
            yield from _check_evaluation_drop(state)

    def _check_step(self, state: State) -> Iterator[tuple[str, str]]:
        """Check the figures of the last steps."""
        yield from self._check_gradients(state)
        yield from self._check_signal()
        yield from self._check_truncation()
        yield from self._check_entropy()
        yield from self._check_mismatch_growth()
        yield from self._check_experts()
        yield from self._check_timeouts()
        yield from self._check_rate()
        yield from self._check_reference()
        yield from _check_dropped_groups(state)

    def _mean(self, name: str, steps: int = WINDOW) -> float | None:
        """Return the mean over the last `steps`; None until all of them have a value."""
        values = [figures[name] for figures in self._last(steps) if name in figures]
        return fmean(values) if len(values) == steps else None

    def _last(self, steps: int) -> list[Figures]:
        return list(self._recent)[-steps:]

    def _at_first(self, name: str) -> list[float]:
        """Return the values of the first WINDOW steps that have one."""
        return [figures[name] for figures in self._first if name in figures]

    def _check_signal(self) -> Iterator[tuple[str, str]]:
        flat = self._mean("groups/no_variance")
        if flat is not None and flat >= FLAT_SHARE:
            reward, first = self._mean("reward/mean"), self._at_first("reward/mean")
            before = f"; in the first {len(first)} steps {fmean(first):.3g}" if first else ""
            yield (
                "no-signal",
                f"{flat:.0%} of the groups of the last {WINDOW} steps have the same reward for "
                f"all siblings (mean reward {reward:.3g}{before}), so they teach nothing: check "
                "the responses with `laminar samples`, the reward function and the answer "
                "column, and optim.lr if the reward fell; otherwise the task is too hard or too "
                "easy for this model",
            )

    def _check_truncation(self) -> Iterator[tuple[str, str]]:
        cut = self._mean("response_length/clip_ratio", ENDS_WINDOW)
        if cut is not None and cut >= TRUNCATED_SHARE:
            yield "truncated", self._describe_truncated(cut)

    def _describe_truncated(self, cut: float) -> str:
        """Give the share of each reason, the largest first, with the setting of its limit."""
        totals = Counter[str]()
        for figures in self._last(ENDS_WINDOW):
            totals.update({name: figures.get(f"truncated/{name}", 0.0) for name in LIMITS})
        shares = {name: total / ENDS_WINDOW for name, total in totals.most_common() if total}
        parts = [f"{share:.0%} by {LIMITS[name]}" for name, share in shares.items()]
        text = f"{cut:.0%} of the responses of the last {ENDS_WINDOW} steps were truncated"
        if next(iter(shares), FinishReason.LENGTH) == FinishReason.LENGTH:
            parts = parts or [f"by {LIMITS[FinishReason.LENGTH]}"]
            remedy = "the model ends its responses (chat template, end tokens)"
        else:
            remedy = "its calls make progress"
        return (
            f"{text}: {', '.join(parts)}. Raise the first limit, or check with `laminar samples` "
            f"whether {remedy}"
        )

    def _check_entropy(self) -> Iterator[tuple[str, str]]:
        now, first = self._mean(ENTROPY), self._at_first(ENTROPY)
        if now is None:
            return
        uniform = self._recent[-1].get("actor/max_entropy", 0.0)
        if now > UNIFORM_SHARE * uniform > 0:
            yield (
                "near-uniform",
                f"the entropy is {now:.3g} nats per token, near the {uniform:.3g} of the uniform "
                "distribution over the vocabulary, so the model samples almost at random: training "
                "has diverged (try a smaller optim.lr), or model.name has no trained weights",
            )
        if len(first) == WINDOW and now < ENTROPY_SHARE * fmean(first) and not self._has_risen():
            yield (
                "entropy",
                f"the entropy fell from {fmean(first):.3g} to {now:.3g} nats per token, and the "
                "reward has not risen: the model gives nearly the same response each time and no "
                "longer explores; try a smaller optim.lr, or algorithm.entropy_coeff or "
                "use_kl_loss",
            )

    def _has_risen(self) -> bool:
        """Return whether the mean reward is above that of each of the first steps."""
        now = self._mean(REWARD)
        return now is not None and now > max(self._at_first(REWARD), default=now)

    def _check_gradients(self, state: State) -> Iterator[tuple[str, str]]:
        signals = state.signals
        if signals.nonfinite_in_row >= NONFINITE_ROW:
            yield ("non-finite", _describe_nonfinite("last", signals.nonfinite_in_row, "optim.lr"))
        recent = list(self._recent)[-NONFINITE_ROW:]
        counts = [int(figures.get("critic/nonfinite_updates", 0)) for figures in recent]
        if len(counts) == NONFINITE_ROW and all(counts):
            yield "non-finite", _describe_nonfinite("critic's last", sum(counts), "critic.lr")

    def _check_mismatch_growth(self) -> Iterator[tuple[str, str]]:
        """Compare the mismatch with that of the steps before; name its larger part."""
        now, before = self._mean(MISMATCH), self._mismatches[:-WINDOW]
        if now is None or now <= MISMATCH_NATS or not before:
            return
        usual = max(median(before), 0.0)  # below 0 by rounding
        if now > MISMATCH_GROWTH * usual:
            numerics = min(fmean(self._probe_kls.values()), now) if self._probe_kls else 0.0
            yield (
                "mismatch-grows",
                f"the KL of engine and trainer (mismatch_kl/mean) averages {now:.3g} nats per "
                f"token over the last {WINDOW} steps, with a median of {usual:.3g} before: "
                f"{_describe_parts(numerics, now - numerics)}; the reward often falls next",
            )

    def _check_experts(self) -> Iterator[tuple[str, str]]:
        dead = [figures.get(DEAD_EXPERTS, 0.0) for figures in self._recent]
        if len(dead) == WINDOW and min(dead) > 0:
            yield (
                "dead-experts",
                f"in each of the last {WINDOW} steps at least {min(dead):.0f} experts, summed over "
                f"the layers, got no token ({DEAD_EXPERTS}) and so learn nothing: try a smaller "
                "optim.lr, or more responses in a step if the batch is small",
            )

    def _check_timeouts(self) -> Iterator[tuple[str, str]]:
        last = self._last(ENDS_WINDOW)
        shares = {name: sum(f.get(f"truncated/{name}", 0.0) for f in last) for name in TIMEOUTS}
        share, worst = sum(shares.values()) / ENDS_WINDOW, max(TIMEOUTS, key=shares.__getitem__)
        if len(last) == ENDS_WINDOW and share >= TIMEOUT_SHARE:
            yield (
                "tool-timeouts",
                f"{share:.0%} of the responses of the last {ENDS_WINDOW} steps ended because their "
                f"tools did not answer in time, most by {LIMITS[worst]}; they are trained as "
                "truncated: give the tool a timeout of its own that returns an error text, or "
                'raise that setting, or set algorithm.truncated = "mask"',
            )

    def _check_published(self) -> Iterator[tuple[str, str]]:
        """Compare two versions whose steps are known; a replica probes no bytes that it has."""
        (former, digest), (version, same) = [*self._published, (0, ""), (0, "")][:2]
        if digest == same and any(former < v <= version for v in self._changed):
            yield (
                "weights-unchanged",
                f"weight version {version} was published with the bytes of version {former}, "
                "though training has changed the weights, so the replicas sample with old ones: "
                "stop the run, unless optim.lr is too small for weights.dtype; float32 shows "
                "smaller changes",
            )

    def _check_rate(self) -> Iterator[tuple[str, str]]:
        """Find a rate that rises below its peak: a schedule only rises, then only falls."""
        *earlier, now = self._rates or [0.0]
        peak, before = max(earlier, default=0.0), earlier[-1] if earlier else 0.0
        if min(now, peak) > before * (1 + ROUNDING):
            yield (
                "learning-rate",
                f"the learning rate rose from {before:.3g} to {now:.3g} after it had fallen from "
                f"{peak:.3g}, so the schedule is not the one that the run began with: "
                "a decay ends at trainer.total_training_steps; resume with the former value, or "
                "fork the run to begin a new schedule",
            )

    def _check_reference(self) -> Iterator[tuple[str, str]]:
        """Check the sign of the KL to the reference, and that it is not 0 once weights moved."""
        before, now = [{}, *self._recent][-2:]
        losses = [figures.get(KL, nan) for figures in (before, now)]
        tokens = now.get("perf/total_num_tokens", 1.0)  # summed with loss_agg_mode token-sum
        if all(loss < -KL_NOISE * tokens**0.5 for loss in losses):
            yield (
                "kl-negative",
                f"the KL to the reference model ({KL}) is {losses[1]:.3g}, but both estimators are "
                "at least 0: its gradient drives the policy away from the reference; stop the "
                "run, since the term has the wrong sign",
            )
        if losses[1] == 0 and before.get("mismatch/moved", 0.0) > 0:
            yield (
                "kl-zero",
                f"the policy has moved, but the KL to the reference model ({KL}) is exactly 0, so "
                "the reference equals the policy and the penalty does nothing: stop the run, and "
                "check that model.name holds the weights that training began with",
            )


def _describe_nonfinite(whose: str, count: int, rate: str) -> str:
    return (
        f"the gradients of the {whose} {count} updates were not finite, and the updates were "
        f"skipped: the usual causes are a learning rate ({rate}) that is too large, "
        "optim.clip_grad = 0, huge rewards, and a loss or advantage function of yours that "
        "divides by 0"
    )


def _describe_parts(numerics: float, staleness: float) -> str:
    """Name the parts of a mismatch, nats per token, and the remedy for the larger one."""
    parts = (
        f"{numerics:.2g} from numerics (measured on the probe, with equal weights) and "
        f"{staleness:.2g} from staleness"
    )
    if numerics > staleness:
        return f"{parts}; give trainer.dtype, weights.dtype and rollout.dtype the same precision"
    return f"{parts}; try a smaller optim.lr or async.max_staleness"


def _few_prompts(state: State) -> Iterator[tuple[str, str]]:
    wanted = state.settings.groups_per_step
    if 0 <= state.data.num_train < wanted:
        yield (
            "few-prompts",
            f"the data has {state.data.num_train} training prompts but a step takes {wanted} "
            "(data.train_batch_size): steps are smaller or repeat prompts; give more prompts or "
            "a smaller batch",
        )


def _reward_errors(state: State) -> Iterator[tuple[str, str]]:
    rewards = state.signals.rewards
    if rewards is None or rewards.answers < ANSWERS_MIN:
        return
    failed = sum(rewards.errors.values())
    if failed > ERRORS_SHARE * rewards.answers:
        yield (
            "reward-errors",
            f"the reward failed on {failed} of {rewards.answers} responses "
            f"({failed / rewards.answers:.0%}), first: {rewards.first}; they count as "
            "reward.error_score, so the model learns from the failures",
        )


def _check_evaluation_drop(state: State) -> Iterator[tuple[str, str]]:
    """Compare the last evaluation with the best earlier one, by score, else by accuracy."""
    results = [describe_evaluation(result) for result in state.evaluations.results]
    for name in ("score", "share"):
        known = [r for r in results if r[name] is not None and r[f"{name}_se"] is not None]
        if len(known) < 2:
            continue
        last, best = known[-1], max(known[:-1], key=lambda r: r[name])
        error = (last[f"{name}_se"] ** 2 + best[f"{name}_se"] ** 2) ** 0.5
        if best[name] - last[name] > FALL_ERRORS * error > 0:
            what = "score" if name == "score" else "accuracy"
            yield (
                "held-out-falls",
                f"the evaluation {what} fell from {best[name]:.3g} after step {best['step']} to "
                f"{last[name]:.3g} after step {last['step']} (standard error of the difference "
                f"{error:.2g}): check `laminar samples --eval {last['step']}`, the sign of the "
                "reward and optim.lr",
            )
            return


def _check_dropped_groups(state: State) -> Iterator[tuple[str, str]]:
    groups = state.work.ledger.groups
    dropped = {r: n for r, n in groups.dropped.items() if r not in DROPPED_AS_PLANNED}
    lost, ended = sum(dropped.values()), sum(dropped.values()) + groups.trained
    if lost >= max(DROPPED_MIN, DROPPED_SHARE * ended):
        reason = max(dropped, key=dropped.__getitem__)
        yield (
            "dropped-groups",
            f"{lost} of {ended} prompts were dropped and teach nothing ({dropped[reason]} as "
            f"{reason}, see docs/metrics.md), so the model learns from a biased choice: "
            "check the reward function's None results and the environment's failures with "
            "`laminar samples`; algorithm.min_scored is the least number of scored siblings",
        )


def _check_mismatch(event: ev.StepCompleted) -> Iterator[tuple[str, str]]:
    if event.left_out:
        part = event.left_out[0]
        yield (
            "mismatch",
            f"responses of {part.replica} with weight version {part.version} do not come from "
            "those weights and are not trained; if this repeats, the engine of that replica "
            "does not compute what the trainer does",
        )


def _prompts_differ(event: ev.StepCompleted) -> Iterator[tuple[str, str]]:
    differ = event.metrics.get("groups/prompts_differ", 0.0)
    if differ > 0:
        yield (
            "prompts-differ",
            f"siblings began with different prompts in {differ:.0%} of the groups of a step "
            "(groups/prompts_differ), so a group's mean cannot be their baseline: reset() of the "
            "environment must return the same text to all siblings, which share a Python random "
            "seed",
        )


def _describe_rejected(event: ev.WeightsRejected) -> str:
    return (
        f"weight version {event.version} was rejected by a replica: {event.reason}; it loads "
        "them again; if this repeats, engine and trainer disagree on this model"
    )


def first_look(run_dir: Path) -> dict[str, str]:
    """Return the warnings from before the run, by kind; none without the file."""
    try:
        found: dict[str, str] = json.loads((run_dir / FIRST_LOOK_FILE).read_bytes())
    except FileNotFoundError:
        return {}
    return found
