"""The figures of one training step, under the names that users of verl know.

Reads   the consumed samples and the per-token figures of every micro-batch
Gives   metrics, the engine mismatch per (replica, version), the reward per version

Tokens are folded to one row per sample, and to one sum per (replica, version) that sampled them,
after each micro-batch. Every figure of a step, of a replica or of a length class is then a sum
divided by its tokens: never a mean of means, which would depend on the split.
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laminar.training import steps
from laminar.training.algorithms.advantages import CONSTANT_SPREAD
from laminar.training.model.micro_batches import MicroBatch, by_group
from laminar.training.ranks import Ranks

Column = NDArray[np.float64]  # one number per sample

#: metric -> figure whose mean over the trained tokens the metric is
TOKEN_MEANS = {
    "actor/entropy": "entropy",
    "actor/pg_clipfrac": "clipped",
    "actor/pg_clipfrac_lower": "clipped_lower",
    "actor/ppo_kl": "ppo_kl",
    "mismatch_kl/mean": "mismatch_kl",
    "train_rollout_logprob_abs_diff/mean": "abs_diff",
    "rollout_corr/is_mean": "is_weight",
    "rollout_corr/is_clipped_fraction": "is_capped",
    "rollout_corr/is_oob_ratio": "is_outside",
    "rollout_corr/rs_masked_fraction": "rs_masked",
}
#: metric -> figure whose maximum the metric is; is_max is the ratio before the cap
TOKEN_MAXIMA = {"train_rollout_logprob_abs_diff/max": "abs_diff", "rollout_corr/is_max": "is_ratio"}
ORIGINS_SHOWN = 32
"""Replicas and versions that get separate figures: for ten thousand they would be megabytes."""
EXTRAS_SHOWN = 64
"""Extra figures of rewards, at most: a function that names them per sample would add megabytes."""
#: metrics that are also given by quarter of the samples, shortest responses first
METRICS_BY_LENGTH = (
    "actor/pg_clipfrac",
    "rollout_corr/is_mean",
    "rollout_corr/is_oob_ratio",
    "rollout_corr/rs_masked_fraction",
)
#: the means of `Mismatch`, in its order
MISMATCH_FIGURES = ("abs_diff", "mismatch_kl", "doubt")


class TokenFigures:
    """Per-token figures of a step, folded to sums and maxima per sample.

    Figures of the mismatch are also summed per origin: a sample may have spans of several.
    """

    def __init__(self) -> None:
        self.sample_ids: list[str] = []
        self._sums: dict[str, list[Column]] = {}
        self._maxima: dict[str, list[Column]] = {}
        #: sums of MISMATCH_FIGURES, then tokens; separate for continued responses (`SpanPart`)
        self._parts: dict[steps.SpanPart, Column] = {}

    def add(self, micro: MicroBatch, figures: Mapping[str, Tensor]) -> None:
        """Add the figures [tokens] of one micro-batch; of an empty one, only their names."""
        counts = micro.rows.counts
        if micro.empty:
            counts = counts[:0]
        else:
            self.sample_ids += micro.sample_ids
        starts = np.cumsum(counts) - counts
        self._sums.setdefault("tokens", []).append(counts.astype(np.float64))
        arrays = {name: values.double().cpu().numpy() for name, values in figures.items()}
        for name, array in arrays.items():
            self._sums.setdefault(name, []).append(np.add.reduceat(array, starts))
            self._maxima.setdefault(name, []).append(np.maximum.reduceat(array, starts))
        if not micro.empty:
            self._add_to_parts(micro, [arrays[name] for name in MISMATCH_FIGURES])

    def join(self, ranks: Ranks, samples: Sequence[steps.TrainSample]) -> None:
        """Merge the figures of all ranks; call once; `samples`: those of all ranks together."""
        if ranks.size == 1 or not samples:
            return
        row_of = {s.sample_id: row for row, s in enumerate(samples)}
        own = [row_of[sample_id] for sample_id in self.sample_ids]
        for columns in (self._sums, self._maxima):  # other ranks' rows of a maximum are 0, too
            table = np.zeros((len(columns), len(samples)))
            for column, name in zip(table, columns, strict=True):
                column[own] = np.concatenate(columns[name])
            ranks.all_reduce(torch.from_numpy(table))
            columns.update((name, [column]) for name, column in zip(columns, table, strict=True))
        self.sample_ids = [s.sample_id for s in samples]
        parts = dict.fromkeys(part for s in samples for part in steps.parts_of(s.spans))
        none = np.zeros(len(MISMATCH_FIGURES) + 1)
        sums = np.stack([self._parts.get(part, none) for part in parts])
        ranks.all_reduce(torch.from_numpy(sums))
        self._parts = dict(zip(parts, sums, strict=True))

    def _add_to_parts(self, micro: MicroBatch, figures: Sequence[Column]) -> None:
        """Add mismatch `figures` [tokens] to the sums of each span's part."""
        counts = np.array([span.num_tokens for span in micro.spans])
        starts = np.cumsum(counts) - counts
        columns = [*(np.add.reduceat(figure, starts) for figure in figures), counts]
        for part, sums in zip(micro.parts, np.stack(columns, axis=1), strict=True):
            self._parts[part] = self._parts.get(part, 0.0) + sums

    def compute_mismatch(self) -> dict[steps.Origin, steps.Mismatch]:
        """Return means over the tokens of each origin; a masked sample has no figures."""
        sums: dict[steps.Origin, Column] = {}
        for part, column in self._parts.items():
            sums[part.origin] = sums.get(part.origin, 0.0) + column
        return {origin: _mean(column) for origin, column in sums.items()}

    def went_on(self) -> dict[steps.Origin, steps.Mismatch]:
        """Return the same over tokens of responses that continued with weights loaded in flight."""
        return {part.origin: _mean(sums) for part, sums in self._parts.items() if part.went_on}

    def __contains__(self, name: str) -> bool:
        return name in self._maxima

    def get_sums(self, name: str) -> Column:
        """Return sums per sample, in the order of `sample_ids`; name "tokens" counts them."""
        parts = self._sums[name]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]  # once, because every quarter reads its rows
        return parts[0]

    def compute_mean(self, name: str, rows: NDArray[np.intp] | slice = slice(None)) -> float:
        """Return the mean over the tokens of the chosen samples."""
        return float(self.get_sums(name)[rows].sum() / self.get_sums("tokens")[rows].sum())

    def compute_maximum(self, name: str) -> float:
        return float(np.concatenate(self._maxima[name]).max())


def _mean(sums: Column) -> steps.Mismatch:
    diff, k3, doubt, tokens = map(float, sums)
    return steps.Mismatch(diff / tokens, k3 / tokens, doubt / tokens, int(tokens))


def token_metrics(figures: TokenFigures) -> dict[str, float]:
    """Compute metrics over the trained tokens, without those of a correction that is off."""
    found = {
        key: figures.compute_mean(name) for key, name in TOKEN_MEANS.items() if name in figures
    } | {
        key: figures.compute_maximum(name) for key, name in TOKEN_MAXIMA.items() if name in figures
    }
    if not figures.sample_ids:
        return found
    shortest_first = np.lexsort((np.array(figures.sample_ids), figures.get_sums("tokens")))
    for quarter, rows in enumerate(np.array_split(shortest_first, 4), start=1):
        for key in METRICS_BY_LENGTH:
            if TOKEN_MEANS[key] in figures and len(rows):
                found[f"{key}/length_q{quarter}"] = figures.compute_mean(TOKEN_MEANS[key], rows)
    return found


def batch_metrics(samples: Sequence[steps.TrainSample], step: int) -> dict[str, float]:
    """Compute metrics of the consumed batch, masked samples included."""
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    advantages = np.concatenate([s.token_advantages for s in samples])
    responses = np.array([len(s.response_ids) for s in samples], dtype=np.float64)
    staleness = [step - s.version_step for s in samples]
    found = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "critic/score/mean": rewards.mean(),
        "critic/advantages/mean": advantages.mean(),
        "critic/advantages/max": advantages.max(),
        "critic/advantages/min": advantages.min(),
        "response_length/mean": responses.mean(),
        "response_length/max": responses.max(),
        "response_length/min": responses.min(),
        "response_length/p50": np.percentile(responses, 50),
        "response_length/p99": np.percentile(responses, 99),
        "response_length/clip_ratio": np.mean([s.truncated for s in samples]),
        "prompt_length/mean": np.mean([len(s.prompt_ids) for s in samples]),
        "training/off_policy/trajectory_staleness/mean": np.mean(staleness),
        "training/off_policy/trajectory_staleness/max": max(staleness),
        "perf/total_num_tokens": sum(s.length for s in samples),
    }
    causes = Counter(s.truncated_by for s in samples if s.truncated)
    found |= {f"truncated/{cause}": count / len(samples) for cause, count in causes.items()}
    if any(s.parents for s in samples):
        branches = [len(s.list_rows()) for s in samples]
        found |= {"branches/mean": np.mean(branches), "branches/max": max(branches)}
    penalties = [s.penalty for s in samples if s.penalty is not None]
    if penalties:
        found["critic/rewards/mean"] = np.mean([s.trained_reward for s in samples])
        found["reward/overlong_ratio"] = np.mean(np.array(penalties) < 0)
    found |= _group_shares(samples) | _staleness_by_length(responses, staleness)
    found |= steps.token_staleness(samples, step)
    return {key: float(value) for key, value in found.items()} | _reward_extras(samples)


def count_skipped(model: str, reasons: Sequence[str | None]) -> dict[str, float]:
    """Count a model's skipped updates, by the reason of each update or None."""
    return {
        f"{model}/skipped_updates": float(sum(reason is not None for reason in reasons)),
        f"{model}/no_signal_updates": float(reasons.count(steps.NO_SIGNAL)),
        f"{model}/nonfinite_updates": float(reasons.count(steps.NON_FINITE)),
    }


def update_metrics(updates: Sequence[steps.Update], vocab_limit: int) -> dict[str, float]:
    """Average over the step's mini-batches; the losses are already sums over their tokens."""
    found = {
        "actor/pg_loss": float(np.mean([u.pg_loss for u in updates])),
        "actor/grad_norm": float(np.mean([u.grad_norm for u in updates])),
        "actor/max_entropy": math.log(vocab_limit),
        **count_skipped("actor", [u.skipped_reason for u in updates]),
    }
    kl_losses = [u.kl_loss for u in updates if u.kl_loss is not None]
    return found | ({"actor/kl_loss": float(np.mean(kl_losses))} if kl_losses else {})


def memory_metrics(device: torch.device, estimated: int) -> dict[str, float]:
    """Return the peak memory of this process so far, 10^9 bytes.

    On a GPU: memory of its tensors. Otherwise: resident memory of the process, with programs and
    copies. `estimated`: the estimate from before the start (footprint.py).
    """
    if device.type == "cuda":
        found = {"perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    else:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {"perf/max_resident_gb": kib * 1024 / 1e9}
    return found | {"perf/estimated_memory_gb": estimated / 1e9}


def _group_shares(samples: Sequence[steps.TrainSample]) -> dict[str, float]:
    """Return shares of groups whose siblings agree: such a group teaches little or nothing."""
    groups = list(by_group(samples).values())
    flat = [np.ptp([s.trained_reward for s in group]) <= CONSTANT_SPREAD for group in groups]
    differ = [len({s.prompt_ids.tobytes() for s in group}) > 1 for group in groups]
    shares = {"groups/prompts_differ": float(np.mean(differ))} if any(differ) else {}
    return shares | {
        "groups/all_right": np.mean([all(s.correct for s in group) for group in groups]),
        "groups/all_wrong": np.mean([not any(s.correct for s in group) for group in groups]),
        "groups/no_variance": np.mean(flat),
    }


def _staleness_by_length(responses: Column, staleness: Sequence[int]) -> dict[str, float]:
    """Return the mean over each quarter of the samples, shortest responses first."""
    name, ages = "training/off_policy/trajectory_staleness/length_q", np.array(staleness)
    quarters = np.array_split(np.argsort(responses, kind="stable"), 4)
    return {f"{name}{q}": ages[rows].mean() for q, rows in enumerate(quarters, 1) if len(rows)}


def _reward_extras(samples: Sequence[steps.TrainSample]) -> dict[str, float]:
    """Return means of the reward function's extra figures, over the samples that have them."""
    names = sorted({name for sample in samples for name in sample.extras})[:EXTRAS_SHOWN]
    return {
        f"reward_extra/{name}": float(
            np.mean([s.extras[name] for s in samples if name in s.extras])
        )
        for name in names
    }


def reward_by_version(samples: Sequence[steps.TrainSample]) -> dict[int, tuple[float, int]]:
    """Return by weight version, ascending: (mean reward, samples)."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.weight_version, []).append(sample.reward)
    return {v: (float(np.mean(r)), len(r)) for v, r in sorted(rewards.items())}


def by_origin(
    mismatch: Mapping[steps.Origin, steps.Mismatch],
    went_on: Mapping[steps.Origin, steps.Mismatch],
    rewards: Mapping[int, tuple[float, int]],
) -> dict[str, float]:
    """Flatten the largest mismatches and the newest versions, ORIGINS_SHOWN each, to metrics.

    A replica with wrong weights stands out by a large mismatch. The number left out is given too.
    """
    worst = nlargest(ORIGINS_SHOWN, mismatch.items(), key=_get_mismatch_size)
    newest = sorted(rewards)[-ORIGINS_SHOWN:]
    figures = {f"by_origin/mismatch_kl/{name}/{v}": m.mean_k3 for (name, v), m in worst}
    flown = nlargest(ORIGINS_SHOWN, went_on.items(), key=_get_mismatch_size)
    figures |= {f"by_origin/reward/{v}": rewards[v][0] for v in newest}
    left_out = len(mismatch) + len(rewards) - len(figures)
    figures |= {f"by_origin/mismatch_kl/{name}/{v}/went_on": m.mean_k3 for (name, v), m in flown}
    return figures | ({"by_origin/left_out": float(left_out)} if left_out else {})


def _get_mismatch_size(origin: tuple[steps.Origin, steps.Mismatch]) -> float:
    """Return the sort key of a mismatch; a figure that is not finite counts as the largest."""
    k3 = origin[1].mean_k3
    return k3 if math.isfinite(k3) else math.inf
