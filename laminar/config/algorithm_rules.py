"""Names in [algorithm]: losses, advantage estimators, importance weights, rejected samples.

Reads   the whole tree
Gives   the names, the options of each loss, the bounds of the correction as numbers
Raises  ConfigError, which names the key, the value and the fix

The functions of these names are in training/, which needs torch; everything that can be checked
without it is checked here, before anything starts.
"""

from __future__ import annotations

import math

from laminar.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from laminar.config.keys import ConfigError
from laminar.config.tree import Config

LOSS_OPTIONS: dict[str, dict[str, float | None]] = {
    "vanilla": {},
    "gspo": {},
    "cispo": {},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gpg": {},
    "geo_mean": {},
    "dppo_tv": {},
    "dro": {"dro_beta": None},
}
"""The losses of algorithm.policy_loss.loss_mode: options and defaults; None: required."""
OWN_AGGREGATION = dict.fromkeys(("sapo", "geo_mean"), "seq-mean-token-mean")
"""Losses that are defined with one loss_agg_mode, which overrides the setting; as in verl."""
ESTIMATORS = (
    "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg",
    "grpo_passk", "gae",
)  # fmt: skip
"""The values of algorithm.adv_estimator."""
REJECTIONS = (
    *(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
"""The values of algorithm.rollout_correction.rollout_rs, named as in verl."""
_CORRECTION = "algorithm.rollout_correction"


def check_algorithm(config: Config) -> None:
    """Check that names and options are known, and bounds are numbers."""
    algorithm = config.algorithm
    loss = algorithm.policy_loss
    _check_name("algorithm.policy_loss.loss_mode", loss.loss_mode, tuple(LOSS_OPTIONS))
    _check_name("algorithm.adv_estimator", algorithm.adv_estimator, ESTIMATORS)
    weight_bounds(algorithm.rollout_correction)
    parse_rejections(algorithm.rollout_correction)
    _check_filter(config)
    known = LOSS_OPTIONS.get(loss.loss_mode)
    if known is None:  # options of the user's own function
        return
    needed = (name for name, value in known.items() if value is None)
    if missing := next((name for name in needed if name not in loss.options), ""):
        raise ConfigError(
            f"algorithm.policy_loss.loss_mode = {loss.loss_mode!r} needs {missing}: give "
            f"algorithm.policy_loss.options = {{ {missing} = NUMBER }}, a number above 0"
        )
    for name, value in loss.options.items():
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            raise ConfigError(
                f"algorithm.policy_loss.options has {name!r}, but loss_mode = {loss.loss_mode!r} "
                f"{takes}; remove it"
            )
        if not _is_number(value) or value <= 0:
            raise ConfigError(
                f"algorithm.policy_loss.options has {name} = {value!r}: give a number above 0"
            )


def _check_filter(config: Config) -> None:
    """Check that a run of prompts without variance ends at some time."""
    key, steps = "algorithm.filter_groups", config.trainer.total_training_steps
    asked = config.algorithm.filter_groups
    if asked.enable and not asked.max_num_gen_batches and steps:
        raise ConfigError(
            f"{key}.max_num_gen_batches = 0 continues a search for prompts with variance to the "
            f"end of the data, and with trainer.total_training_steps = {steps} the data has no "
            "end: give a number of batches, or trainer.total_training_steps = 0"
        )


def weight_bounds(correction: RolloutCorrectionConfig) -> tuple[float, float]:
    """Return the bounds of an importance weight; the lower one is 0 if it is only capped."""
    key, given = f"{_CORRECTION}.rollout_is_threshold", correction.rollout_is_threshold
    low, high = _parse_bounds(key, given)
    if high < 1.0 or low > 1.0:
        raise ConfigError(
            f"{key} = {given!r} leaves out the weight 1, which on-policy data has: give a cap of "
            "at least 1, or bounds around 1, such as 0.5_5.0"
        )
    return low, high


def parse_rejections(correction: RolloutCorrectionConfig) -> list[tuple[str, float, float]]:
    """Return the rules of rollout_rs with bounds: of the ratio for k1, else 0 and a maximum."""
    kinds = [kind.strip() for kind in correction.rollout_rs.split(",") if kind.strip()]
    bounds = [part.strip() for part in correction.rollout_rs_threshold.split(",") if part.strip()]
    key = f"{_CORRECTION}.rollout_rs_threshold"
    for kind in kinds:
        if kind not in REJECTIONS:
            raise ConfigError(
                f"{_CORRECTION}.rollout_rs has {kind!r}, which is none of {', '.join(REJECTIONS)}"
            )
    if len(bounds) != len(kinds) and (len(bounds) != 1 or not kinds):
        raise ConfigError(
            f"{key} = {correction.rollout_rs_threshold!r} has {len(bounds)} bounds for the "
            f"{len(kinds)} rules of rollout_rs = {correction.rollout_rs!r}: give one for all, or "
            "one for each, with a comma between them"
        )
    return [
        (kind, *_rule_bounds(key, kind, bound))
        for kind, bound in zip(kinds, bounds * (len(kinds) if len(bounds) == 1 else 1), strict=True)
    ]


def _rule_bounds(key: str, kind: str, given: str) -> tuple[float, float]:
    low, high = _parse_bounds(key, given)
    if kind.endswith("k1"):
        low = low or 1.0 / high
    elif low:
        raise ConfigError(f"{key} has {given!r} for {kind}: give one number, an upper bound")
    if kind.endswith("k1") and not low <= 1.0 <= high:
        raise ConfigError(f"{key} has {given!r} for {kind}: give bounds around 1, as 0.99_1.01")
    return low, high


def _parse_bounds(key: str, given: str) -> tuple[float, float]:
    """Parse `high`, or `low_high`; low is 0 if it is not given."""
    low, _, high = given.rpartition("_")
    try:
        found = float(low or 0), float(high)
    except ValueError:
        found = math.nan, math.nan
    if not (found[0] >= 0 < found[1] < math.inf and found[0] <= found[1]):
        raise ConfigError(f"{key} = {given!r} is neither a number above 0 nor two, as 0.5_5.0")
    return found


def is_users(reference: str) -> bool:
    """Return whether a reference is a user's `path.py:name`, and not a built-in name."""
    return ":" in reference


def list_user_functions(algorithm: AlgorithmConfig) -> dict[str, str]:
    """Return the user's functions that are used in training: key -> `path.py:name`."""
    named = {
        "algorithm.policy_loss.loss_mode": algorithm.policy_loss.loss_mode,
        "algorithm.adv_estimator": algorithm.adv_estimator,
    }
    return {key: reference for key, reference in named.items() if is_users(reference)}


def _check_name(key: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names and not is_users(value):
        raise ConfigError(
            f"{key} = {value!r} is neither one of {', '.join(names)} nor a function of yours as "
            "path.py:name"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
