"""Trial of the user's loss and estimator before a run starts.

Reads   [algorithm]; the report of training/function_check.py, run in a separate process
Raises  ConfigError in one sentence: the function, what it did, the fix
"""

from __future__ import annotations

from laminar.config import AlgorithmConfig
from laminar.config.algorithm_rules import list_user_functions
from laminar.run.child_process import call_isolated

TRIAL_S = 120.0


def check_functions(algorithm: AlgorithmConfig, limit_s: float = TRIAL_S) -> None:
    """Call the user's functions, if any, on made-up sequences; raise ConfigError on failure."""
    named = list_user_functions(algorithm)
    if not named:
        return
    names = " or ".join(f"{key} = {reference!r}" for key, reference in named.items())
    call_isolated(
        "laminar.training.function_check",
        [],
        limit_s,
        algorithm,
        late=f"{names} takes longer than {limit_s:g} s for a few made-up sequences; correct it",
        ended=f"{names} ends the process that calls it",
        advice="a file of functions must not end its process",
    )
