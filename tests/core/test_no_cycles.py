"""What the core makes and forgets is freed at once: it leaves nothing to the garbage collector.

The coordinator relies on that: it has its state never looked through for cycles.
"""

from __future__ import annotations

import gc

import pytest

from tools.kit.random_worlds import random_world


@pytest.mark.parametrize("seed", range(3))
def test_no_event_leaves_a_cycle(seed: int) -> None:
    world = random_world(seed)
    world.begin()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        before = world.state.seq
        world.run()
        assert world.state.seq > before + 50
        gc.collect()
        left = [found for found in gc.garbage if type(found).__module__.startswith("laminar")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
