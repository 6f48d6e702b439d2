"""Trial of the user's loss and estimator before a run starts.

Reads   [algorithm]; the report of training/function_check.py, run in a separate process
Raises  ConfigError in one sentence: the function, what it did, the fix
"""

from __future__ import annotations

import subprocess

import msgspec

from laminar.config import AlgorithmConfig, ConfigError
from laminar.config.algorithm_rules import list_user_functions
from laminar.names.process_end import describe_exit
from laminar.run.isolated_process import run_isolated

TRIAL_S = 120.0
TRIED = b"tried"  #: printed by training/function_check.py, which needs torch


def check_functions(algorithm: AlgorithmConfig, limit_s: float = TRIAL_S) -> None:
    """Call the user's functions, if any, on made-up sequences; raise ConfigError on failure."""
    named = list_user_functions(algorithm)
    if not named:
        return
    names = " or ".join(f"{key} = {reference!r}" for key, reference in named.items())
    try:
        said, code = run_isolated(
            "laminar.training.function_check", [], msgspec.json.encode(algorithm), limit_s
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{names} takes longer than {limit_s:g} s for a few made-up sequences; correct it"
        ) from None
    if not said:
        raise ConfigError(
            f"{names} ends the process that calls it ({describe_exit(code)}); a file of functions "
            "must not end its process"
        )
    if said != TRIED:
        raise ConfigError(said.decode())
