"""The config tree: every setting of a run, its default, its check, and how files combine.

tree.py says what there is, rules.py what is allowed, reading.py makes a tree from files and
overrides. Nothing here touches torch or the network, so `--dry-run` and the coordinator stay light.
"""

from laminar.config.reading import dumps, is_key, known_keys, load, read_toml, resolve
from laminar.config.rules import CHOICES, ConfigError
from laminar.config.tree import (
    AlgorithmConfig,
    Config,
    DataConfig,
    OptimConfig,
    RewardConfig,
    WeightedFunctionConfig,
)

__all__ = [
    "CHOICES",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "OptimConfig",
    "RewardConfig",
    "WeightedFunctionConfig",
    "dumps",
    "is_key",
    "known_keys",
    "load",
    "read_toml",
    "resolve",
]
