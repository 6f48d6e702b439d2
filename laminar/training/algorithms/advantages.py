"""The advantage estimators by name, and the user's own: functions of AdvantageInputs.

Reads   [algorithm]; the rewards of a whole batch, which samples are siblings, a critic's values
Gives   AdvantageInputs; Estimator, which gives samples their advantages, float64

Advantages are computed over a whole batch, independent of micro-batches and ranks. Rows that are
left out of a step are in no baseline, and get 0.

A group with equal rewards teaches nothing and must give exactly zero. In float32 it does not: the
mean of seven times 0.7 is not 0.7, and a tiny remainder over a tiny standard deviation is a large
number, often of wrong sign. Hence float64, and a spread below which a group counts as constant. A
group of one has no baseline: its advantage is 0, unless a critic is the baseline.

    grpo    (R - mean) / (std + 1e-6) with the sample standard deviation (n - 1), as in verl;
            R - mean without norm_adv_by_std_in_grpo (Dr. GRPO, Liu et al. 2025)
    rloo    R - mean of the others (Ahmadian et al. 2024)
    reinforce_plus_plus            R, whitened over all tokens of the batch (2501.03262)
    reinforce_plus_plus_baseline   R - mean, whitened in the same way
    opo     R - the mean weighted by length (2505.23585)
    gpg     (R - mean) * sequences / sequences with a reward other than 0
    grpo_passk   of the best sibling (best - second) / (std + 1e-6), of the others 0 (2503.19595)
    gae     of each token: the sum of later errors of the critic, each weighed by (gamma lambda)^k,
            whitened over all tokens of the batch (1506.02438); with gamma = lambda = 1 R - V
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.config import AlgorithmConfig, Config, ConfigError
from laminar.run.user_code import UserFunction, load_user_function
from laminar.training.steps import TrainSample

STD_EPSILON = 1e-6  #: added to the standard deviation; verl's
WHITEN_EPSILON = 1e-8  #: added to the variance; verl's
ADAPTIVE_ALPHA = 0.05  #: lambda by length; VAPO's
CONSTANT_SPREAD = 1e-6  #: rewards that differ by no more than this are equal

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator; [sequences] in the order of the batch."""

    rewards: Floats
    groups: Ints  #: group number from 0, equal for siblings
    lengths: Ints  #: response tokens
    extras: Mapping[str, Floats]  #: extra figures of the reward function; NaN: missing
    options: Mapping[str, Any]  #: norm_adv_by_std_in_grpo, gamma, lam
    values: Floats | None = None  #: [tokens]: a critic's, before each token; None: no critic

    @cached_property
    def group_sizes(self) -> Ints:
        """Siblings of each sequence, itself included."""
        return np.bincount(self.groups)[self.groups]

    def group_sums(self, values: Floats) -> Floats:
        """Return the sum of `values` over the group of each sequence."""
        sums: Floats = np.bincount(self.groups, weights=values).astype(np.float64)
        return sums[self.groups]

    def group_means(self, values: Floats) -> Floats:
        """Return the mean of `values` over the group of each sequence."""
        return self.group_sums(values) / self.group_sizes

    @cached_property
    def constant(self) -> NDArray[np.bool_]:
        """Whether all siblings of the sequence have the same reward."""
        high = np.full(len(self.rewards), -np.inf)
        low = np.full(len(self.rewards), np.inf)
        np.maximum.at(high, self.groups, self.rewards)
        np.minimum.at(low, self.groups, self.rewards)
        constant: NDArray[np.bool_] = (high - low) <= CONSTANT_SPREAD
        return constant[self.groups]

    @property
    def centred(self) -> Floats:
        """Rewards minus the mean of their group; exactly 0 where all siblings have the same."""
        return np.where(self.constant, 0.0, self.rewards - self.group_means(self.rewards))

    def per_token(self, values: Floats) -> Floats:
        """Repeat the value of each sequence at each of its tokens, [tokens]."""
        return np.repeat(values, self.lengths)


EstimatorFunction = Callable[[AdvantageInputs], Floats]
"""Returns one number for each sequence, or for each token of all sequences in order."""


def estimate_grpo(batch: AdvantageInputs) -> Floats:
    centred = batch.centred
    if not batch.options["norm_adv_by_std_in_grpo"]:
        return centred
    return centred / (_sample_std(batch) + STD_EPSILON)


def estimate_rloo(batch: AdvantageInputs) -> Floats:
    """Scale R - mean by n / (n - 1), which gives R minus the mean of the others."""
    scale: Floats = batch.group_sizes / np.maximum(batch.group_sizes - 1, 1)
    return batch.centred * scale


def estimate_reinforce_pp(batch: AdvantageInputs) -> Floats:
    return _whiten_values(batch.rewards, batch.lengths)


def estimate_reinforce_pp_baseline(batch: AdvantageInputs) -> Floats:
    return _whiten_values(batch.centred, batch.lengths)


def estimate_opo(batch: AdvantageInputs) -> Floats:
    lengths = batch.lengths.astype(np.float64)
    baseline = batch.group_sums(batch.rewards * lengths) / batch.group_sums(lengths)
    return np.where(batch.constant, 0.0, batch.rewards - baseline)


def estimate_gpg(batch: AdvantageInputs) -> Floats:
    scored = int(np.count_nonzero(batch.rewards))
    return batch.centred * (len(batch.rewards) / max(1, scored))


def grpo_passk(batch: AdvantageInputs) -> Floats:
    found = np.zeros_like(batch.rewards)
    scale = 1.0
    for group in np.unique(batch.groups):
        rows = np.flatnonzero(batch.groups == group)
        if batch.constant[rows[0]]:
            continue
        second, best = rows[np.argsort(batch.rewards[rows], kind="stable")[-2:]]
        if batch.options["norm_adv_by_std_in_grpo"]:
            scale = batch.rewards[rows].std(ddof=1) + STD_EPSILON
        found[best] = (batch.rewards[best] - batch.rewards[second]) / scale
    return found


def estimate_gae(batch: AdvantageInputs) -> Floats:
    lam = batch.options["lam"]
    found = later_errors(batch, adaptive_lam(batch.lengths) if lam == "adaptive" else lam)
    return _whiten_values(found, np.ones(len(found), dtype=np.int64))


def adaptive_lam(lengths: Ints) -> Floats:
    """Return lambda of each sequence: 1 - 1 / (0.05 length), and 0 below 20 tokens (2504.05118)."""
    found: Floats = np.maximum(0.0, 1.0 - 1.0 / (ADAPTIVE_ALPHA * lengths))
    return found


def later_errors(batch: AdvantageInputs, lam: float | Floats) -> Floats:
    """Return A_t = d_t + gamma lam A_(t+1) [tokens], with d_t = r_t + gamma V_(t+1) - V_t.

    The last token has the reward, and no value follows it: a truncated response ended there.
    `lam`: for all sequences, or for each.
    """
    assert batch.values is not None
    gamma, ends = batch.options["gamma"], np.cumsum(batch.lengths)
    after = np.append(batch.values[1:], 0.0)
    after[ends - 1] = 0.0
    errors: Floats = gamma * after - batch.values
    errors[ends - 1] += batch.rewards
    longest_first = np.argsort(-batch.lengths, kind="stable")
    decay = np.broadcast_to(gamma * np.asarray(lam), batch.lengths.shape)[longest_first]
    last, lengths = ends[longest_first] - 1, batch.lengths[longest_first]
    for back in range(1, int(lengths[0])):  # all sequences at once, from their ends
        count = int(np.searchsorted(-lengths, -back, side="left"))  # sequences longer than `back`
        at = last[:count] - back
        errors[at] += decay[:count] * errors[at + 1]
    return errors


def _whiten_values(values: Floats, lengths: Ints) -> Floats:
    """Scale to mean 0 and variance 1 over the tokens; `lengths`: tokens that have each value."""
    tokens = lengths.sum()
    if np.ptp(values) <= CONSTANT_SPREAD:
        return np.zeros_like(values)
    centred = values - (values * lengths).sum() / tokens
    variance = (centred**2 * lengths).sum() / (tokens - 1)
    whitened: Floats = centred / np.sqrt(variance + WHITEN_EPSILON)
    return whitened


def _sample_std(batch: AdvantageInputs) -> Floats:
    """Return the reward's standard deviation in each sequence's group; 0 for a group of one."""
    squares = batch.group_sums(batch.centred**2)
    deviations: Floats = np.sqrt(squares / np.maximum(batch.group_sizes - 1, 1))
    return deviations


ADVANTAGE_ESTIMATORS: dict[str, EstimatorFunction] = {
    "grpo": estimate_grpo,
    "rloo": estimate_rloo,
    "reinforce_plus_plus": estimate_reinforce_pp,
    "reinforce_plus_plus_baseline": estimate_reinforce_pp_baseline,
    "opo": estimate_opo,
    "gpg": estimate_gpg,
    "grpo_passk": grpo_passk,
    "gae": estimate_gae,
}


class Estimator:
    """The advantage estimator of a configuration."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Resolve the name; raises ConfigError if a function of the user cannot be loaded."""
        name = algorithm.adv_estimator
        self.users: UserFunction | None = None
        if name not in ADVANTAGE_ESTIMATORS:
            self.users = load_user_function("algorithm.adv_estimator", name)
        self._function: EstimatorFunction = self.users or ADVANTAGE_ESTIMATORS[name]
        self.options = {
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
        }

    def assign_advantages(
        self, samples: Sequence[TrainSample], left_out: Container[str] = frozenset()
    ) -> list[TrainSample]:
        """Return the samples in their order, each with its advantage.

        Those that are left out get 0, and are in no baseline. Raises ValueError for a reward that
        is not finite, ConfigError if a function of the user fails.
        """
        kept = [s for s in samples if s.sample_id not in left_out]
        given = iter(self.estimate_advantages(inputs_of(kept, self.options)) if kept else ())
        return [
            replace(s, advantage=np.asarray(0.0 if s.sample_id in left_out else next(given)))
            for s in samples
        ]

    def estimate_advantages(self, batch: AdvantageInputs) -> Sequence[float | Floats]:
        """Estimate one number for each sequence, or an array with one for each of its tokens."""
        found = self._function(batch)
        if self.users is not None:
            found = _validate_advantages(found, batch, self.users)
        if len(found) == len(batch.rewards):
            return [float(value) for value in found]
        return np.split(found, np.cumsum(batch.lengths)[:-1])


def with_penalties(samples: Sequence[TrainSample], config: Config) -> Sequence[TrainSample]:
    """Return the samples, each with its length penalty.

    DAPO's soft overlong punishment (2503.14476): none up to reward.overlong_buffer.len tokens
    before the longest response, then a part for each token; at the longest, truncated or not, the
    full penalty.
    """
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if not buffer.len:
        return samples
    parts = ((len(s.response_ids) - longest + buffer.len) / buffer.len for s in samples)
    return [
        replace(s, penalty=min(0.0, -part * buffer.penalty_factor))
        for s, part in zip(samples, parts, strict=True)
    ]


def inputs_of(samples: Sequence[TrainSample], options: Mapping[str, Any]) -> AdvantageInputs:
    """Build the inputs of an estimator; raises ValueError for a reward that is not finite."""
    rewards = np.array([s.trained_reward for s in samples], dtype=np.float64)
    if not np.isfinite(rewards).all():
        bad = samples[int(np.argmin(np.isfinite(rewards)))]
        raise ValueError(f"sample {bad.sample_id} has reward {bad.reward}; it must be finite")
    numbers: dict[str, int] = {}
    names = dict.fromkeys(name for s in samples for name in s.extras)
    return AdvantageInputs(
        rewards=rewards,
        groups=np.array([numbers.setdefault(s.group_id, len(numbers)) for s in samples]),
        lengths=np.array([len(s.response_ids) for s in samples]),
        extras={
            name: np.array([s.extras.get(name, np.nan) for s in samples], dtype=np.float64)
            for name in names
        },
        options=options,
        values=None if samples[0].values is None else np.concatenate([s.values for s in samples]),
    )


def _validate_advantages(found: object, batch: AdvantageInputs, users: UserFunction) -> Floats:
    """Convert the result of a user's function to an array; raises ConfigError."""
    sequences, tokens = len(batch.rewards), int(batch.lengths.sum())
    try:
        array = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.shape not in ((sequences,), (tokens,)):
        shape = f" of shape {array.shape}" if isinstance(found, np.ndarray) else ""
        raise ConfigError(
            f"{users} returned a {type(found).__name__}{shape}; it must return an array with one "
            f"number for each sequence, here {sequences}, or for each token, here {tokens}"
        )
    if not np.isfinite(array).all():
        raise ConfigError(
            f"{users} returned {array[~np.isfinite(array)][0]} among its advantages; they must be "
            "finite numbers"
        )
    return array
