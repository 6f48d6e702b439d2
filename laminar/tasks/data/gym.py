"""reasoning-gym without matplotlib, which takes four times as long to import.

Gives   DATASETS, create_dataset, DatasetSpec, extract_answer of reasoning_gym

Only two datasets use cellpylib, which imports matplotlib, so it is loaded at its first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_late = ModuleType("cellpylib")


def _load_attribute(name: str) -> Any:
    if sys.modules.get("cellpylib") is _late:
        del sys.modules["cellpylib"]
    return getattr(importlib.import_module("cellpylib"), name)


_late.__getattr__ = _load_attribute  # type: ignore[method-assign]
sys.modules.setdefault("cellpylib", _late)

from reasoning_gym.composite import DatasetSpec as DatasetSpec  # noqa: E402
from reasoning_gym.factory import DATASETS as DATASETS  # noqa: E402
from reasoning_gym.factory import create_dataset as create_dataset  # noqa: E402
from reasoning_gym.utils import extract_answer as extract_answer  # noqa: E402
