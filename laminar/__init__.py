"""Asynchronous GRPO-family RL post-training of language models.

    import laminar

    run = laminar.train({"model.name": "..."}, reward_funcs=reward, train_dataset=rows)
    run = laminar.open_run("runs/mine")

docs/python.md explains the names below. They are imported on first use, so a program that only
reads a run loads neither torch nor the components of a run.
"""

from __future__ import annotations

import importlib
from typing import Any

from laminar.names.version import __version__ as __version__

NAMES = ("ActiveRun", "ConfigError", "Run", "RunFailed", "open_run", "start", "train")


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'laminar' has no attribute {name!r}")
    return getattr(importlib.import_module("laminar.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *NAMES]
