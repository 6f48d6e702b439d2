"""A fresh path for a store, in memory where there is such a folder: syncs to a disk cost seconds.

The test that kills processes uses a real disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.storage.database import Database
from tools.kit.store_samples import MEMORY, filled


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder) / "store.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = filled(path)
    yield database
    database.close()
