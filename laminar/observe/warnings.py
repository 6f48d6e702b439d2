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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from laminar.core.state.evaluation_scores import describe_evaluation
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.run.directory import FIRST_LOOK_FILE

WINDOW = 5  #: steps over which a batch's figures are averaged
ANSWERS_MIN = 64  #: minimum number of responses for a share of failed ones
ERRORS_SHARE = 0.05
FLAT_SHARE = 0.9  #: share of the groups with equal rewards for all siblings
TRUNCATED_SHARE = 0.5
ENTROPY_SHARE = 0.1  #: share of the entropy in the first steps
FALL_ERRORS = 3.0  #: standard errors of the difference of two evaluations

Figures = dict[str, float]


class WarningMonitor:
    """Observer of all events; passes warnings to `report`."""

    def __init__(
        self,
        report: Callable[[Event], None],
        at_start: Mapping[str, str] = {},
    ) -> None:
        """Create the monitor; `at_start`: texts of warnings from before the run, by kind."""
        self._report = report
        self._at_start = dict(at_start)
        self._recent: deque[Figures] = deque(maxlen=WINDOW)
        self._first: list[Figures] = []
        self._evaluations = 0
        self._given: set[str] = set()  #: reported already; applied in a later turn

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if isinstance(stamped.event, ev.StepCompleted):
            self.take_figures(stamped.event.metrics)
        if state.phase == Phase.ENDED:
            return
        for kind, text in self._find_warnings(stamped.event, state):
            if kind not in state.warnings and kind not in self._given:
                self._given.add(kind)
                step = state.steps_completed
                self._report(ev.TrainingWarning(kind=kind, step=step, text=text))

    def take_figures(self, figures: Figures) -> None:
        """Take the figures of a completed step; after a restart, earlier ones first."""
        self._recent.append(figures)
        if len(self._first) < WINDOW:
            self._first.append(figures)

    def _find_warnings(self, event: Event, state: State) -> Iterator[tuple[str, str]]:
        """Find kind and text of each present problem, at the events that can reveal it."""
        at_start, self._at_start = self._at_start, {}
        yield from at_start.items()
        if isinstance(event, ev.DataLoaded):
            yield from _few_prompts(state)
        elif isinstance(event, ev.WeightsRejected):
            yield "weights", _describe_rejected(event)
        elif isinstance(event, ev.TrajectoryRewarded | ev.TrajectoryFailed):
            yield from _reward_errors(state)
        elif isinstance(event, ev.StepCompleted):
            yield from _check_mismatch(event)
            yield from _prompts_differ(event)
            yield from self._check_signal()
            yield from self._check_truncation()
            yield from self._check_entropy()
        if len(state.evaluations) > self._evaluations:
            self._evaluations = len(state.evaluations)
            yield from _check_evaluation_drop(state)

    def _mean(self, name: str) -> float | None:
        """Return the mean over the last WINDOW steps; None until all of them have a value."""
        values = [figures[name] for figures in self._recent if name in figures]
        return fmean(values) if len(values) == WINDOW else None

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
        cut = self._mean("response_length/clip_ratio")
        if cut is not None and cut >= TRUNCATED_SHARE:
            yield (
                "truncated",
                f"{cut:.0%} of the responses of the last {WINDOW} steps were truncated at "
                "data.max_response_length: raise it, or check with `laminar samples` whether "
                "the model ends its responses (chat template, end tokens)",
            )

    def _check_entropy(self) -> Iterator[tuple[str, str]]:
        name = "actor/entropy"
        now, first = self._mean(name), self._at_first(name)
        if now is not None and len(first) == WINDOW and now < ENTROPY_SHARE * fmean(first):
            yield (
                "entropy",
                f"the entropy fell from {fmean(first):.3g} to {now:.3g} nats per token: the "
                "model gives nearly the same response each time and no longer explores; try a "
                "smaller optim.lr, or algorithm.entropy_coeff or use_kl_loss",
            )


def _few_prompts(state: State) -> Iterator[tuple[str, str]]:
    wanted = state.settings.groups_per_step
    if 0 <= state.num_train < wanted:
        yield (
            "few-prompts",
            f"the data has {state.num_train} training prompts but a step takes {wanted} "
            "(data.train_batch_size): steps are smaller or repeat prompts; give more prompts or "
            "a smaller batch",
        )


def _reward_errors(state: State) -> Iterator[tuple[str, str]]:
    rewards = state.rewards
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
    results = [describe_evaluation(result) for result in state.evaluations]
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
