"""The rows of a batch, when the store has them and when it has removed them."""

from __future__ import annotations

import pytest

from laminar.actors.batch_fetch import fetch_batch
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.names.ids import TrajectoryId
from tests.actors.parts import removed


async def test_a_step_without_its_tokens_names_what_is_missing() -> None:
    """Its checkpoint was removed by hand, after the store had let the tokens go for it."""
    ids = (TrajectoryId("0.3.0"), TrajectoryId("0.3.1"))
    repeat = cmd.RepeatStep(to="trainer-0", step_index=4, version=5, trajectories=ids, digest="")
    with pytest.raises(ConfigError) as raised:
        await fetch_batch(removed("0.3.1"), repeat)
    assert str(raised.value) == (
        "step 5 cannot be repeated: the store has removed 0.3.1, because a later checkpoint has "
        "the step, but that is missing from checkpoints/; restore it"
    )
