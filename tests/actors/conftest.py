"""Fixtures of the tests of actors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.actors.trained import Processes


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    """A store and a relay, for a trainer to be started beside."""
    found = Processes(tmp_path)
    for name in ("store-0", "relay-0"):
        await found.start(name)
    yield found
    await found.stop()
