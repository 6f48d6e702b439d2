"""reasoning-gym without matplotlib, which takes four times as long to import.

Gives   DATASETS, create_dataset, DatasetSpec, extract_answer of reasoning_gym

Only two datasets use cellpylib, which imports matplotlib, so it is loaded at its first use. Import
this module inside of functions: half a second is for processes that have such a dataset.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

DELAYED = "cellpylib"


def _delay_import() -> None:
    late = sys.modules[DELAYED] = ModuleType(DELAYED)

    def load_attribute(name: str) -> Any:
        if sys.modules.get(DELAYED) is late:
            del sys.modules[DELAYED]
        return getattr(importlib.import_module(DELAYED), name)

    late.__getattr__ = load_attribute  # type: ignore[method-assign]


if DELAYED not in sys.modules:
    _delay_import()

from reasoning_gym.composite import DatasetSpec as DatasetSpec  # noqa: E402
from reasoning_gym.factory import DATASETS as DATASETS  # noqa: E402
from reasoning_gym.factory import create_dataset as create_dataset  # noqa: E402
from reasoning_gym.utils import extract_answer as extract_answer  # noqa: E402
