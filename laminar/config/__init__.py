"""The config tree: every setting of a run, its default, its check, and how files combine.

tree.py, algorithm.py, rollout.py, tasks.py and training.py declare each key and its values, keys.py
checks a value by its declaration, rules.py and algorithm_rules.py check several together,
reading.py makes a tree from files and overrides. Nothing here touches torch or the network, so
`--dry-run` and the coordinator stay light.
"""

from laminar.config.algorithm import AlgorithmConfig
from laminar.config.keys import ConfigError, known_keys
from laminar.config.reading import (
    dump_config,
    flatten_config,
    is_key,
    load_config,
    read_toml,
    replace_keys,
    resolve_config,
)
from laminar.config.tasks import RewardConfig, WeightedFunctionConfig
from laminar.config.training import OptimConfig
from laminar.config.tree import Config, DataConfig

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "OptimConfig",
    "RewardConfig",
    "WeightedFunctionConfig",
    "dump_config",
    "flatten_config",
    "is_key",
    "known_keys",
    "load_config",
    "read_toml",
    "replace_keys",
    "resolve_config",
]
