"""What [algorithm] names: losses, advantage estimators, importance weights, rejected samples.

Reads   the whole tree
Gives   the names, the options of each loss, the bounds of the correction as numbers
Raises  ConfigError, which names the key, the value and the fix

The functions of these names are in training/, which needs torch; what can be said of a name without
it is said here, before anything starts.
"""

from __future__ import annotations

import math

from laminar.config.algorithm import AlgorithmConfig
from laminar.config.keys import ConfigError
from laminar.config.tree import Config

LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "vanilla": {},
    "gspo": {},
    "cispo": {},
}
"""Of algorithm.policy_loss.loss_mode: each name, with its options and their defaults."""
ESTIMATORS = ("grpo", "rloo")
"""Of algorithm.adv_estimator."""


def check_algorithm(config: Config) -> None:
    """Names and options are known, and bounds are numbers."""
    algorithm = config.algorithm
    loss = algorithm.policy_loss
    _check_name("algorithm.policy_loss.loss_mode", loss.loss_mode, tuple(LOSS_OPTIONS))
    _check_name("algorithm.adv_estimator", algorithm.adv_estimator, ESTIMATORS)
    known = LOSS_OPTIONS.get(loss.loss_mode)
    if known is None:  # options of the user's own function
        return
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


def is_users(reference: str) -> bool:
    """Whether it is `path.py:name`, and no name of ours."""
    return ":" in reference


def users_functions(algorithm: AlgorithmConfig) -> dict[str, str]:
    """The functions of the user that train: key -> `path.py:name`."""
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
