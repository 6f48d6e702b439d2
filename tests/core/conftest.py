"""Random runs, made once for all tests that look at them."""

from __future__ import annotations

import pytest

from tools.kit.random_worlds import failing_world, pausing_world, random_world
from tools.kit.world import World

GOOD_SEEDS, FAILING_SEEDS, PAUSING_SEEDS = 150, 40, 30


@pytest.fixture(scope="session")
def good_runs() -> list[World]:
    """Runs that lose replicas, publishes and rewards, and reach their end all the same."""
    return [random_world(seed).run() for seed in range(GOOD_SEEDS)]


@pytest.fixture(scope="session")
def failing_runs() -> list[World]:
    """Runs in which a process dies that the run cannot do without."""
    return [failing_world(seed).run() for seed in range(FAILING_SEEDS)]


@pytest.fixture(scope="session")
def pausing_runs() -> list[World]:
    """Runs that are asked to pause, early or late."""
    return [pausing_world(seed).run() for seed in range(PAUSING_SEEDS)]
