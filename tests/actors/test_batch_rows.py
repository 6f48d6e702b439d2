"""The rows of a batch, when the store has them and when it has removed them."""

from __future__ import annotations

from typing import cast

import pytest

from laminar.actors.batch_rows import batch_of
from laminar.actors.clients import StoreClient
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.ids import TrajectoryId
from laminar.net.rpc_client import RpcClient
from laminar.storage import messages as m


class Removed:
    """A store that has removed the tokens of one of two rows."""

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        return m.encode(m.FetchReply(trajectories=(), removed=("0.3.1",)))


async def test_a_step_without_its_tokens_names_what_is_missing() -> None:
    """Its checkpoint was removed by hand, after the store had let the tokens go for it."""
    client = StoreClient(cast(RpcClient, Removed()), disk_wait_s=1.0)
    ids = (TrajectoryId("0.3.0"), TrajectoryId("0.3.1"))
    redo = cmd.RedoStep(to="trainer-0", step_index=4, version=5, trajectories=ids, digest="")
    with pytest.raises(ConfigError) as raised:
        await batch_of(client, redo)
    assert str(raised.value) == (
        "step 5 cannot be trained again: the store has removed 0.3.1, because a later checkpoint "
        "had it, which is not in checkpoints/ any more: put it back"
    )
