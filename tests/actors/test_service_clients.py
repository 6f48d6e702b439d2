"""What actors ask of the store: large batches in parts that its replies have room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from laminar.actors.service_clients import StoreClient
from laminar.net.rpc_client import RpcClient
from laminar.storage import messages as m


def row(name: str) -> m.StoredTrajectory:
    return m.StoredTrajectory(
        trajectory_id=name,
        group_id="0.0",
        sibling=0,
        purpose="train",
        row_index=0,
        attempt=1,
        placement=1,
        replica=None,
        spans=(),
        weight_version=None,
        version_step=None,
        temperature=None,
        status="rewarded",
        finish_reason=None,
        digest=None,
        reward=None,
        reward_reason=None,
        reward_detail=None,
        end=None,
        prompt_ids=b"",
        tokens=b"",
        logprobs=b"",
        segment_lengths=(),
    )


class Store:
    """As many rows in a reply as there is room for."""

    def __init__(self, room: Callable[[int], int]) -> None:
        """`room`: rows, by the number of the reply."""
        self.asked: list[int] = []
        self._room = room

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        request = m.decode_request(body)
        assert isinstance(request, m.Fetch)
        self.asked.append(len(request.ids))
        room = self._room(len(self.asked))
        rows = tuple(row(name) for name in request.ids[:room])
        return m.encode(m.FetchReply(trajectories=rows, left_out=request.ids[room:]))


NAMES = [f"0.{n}.0" for n in range(20_000)]


async def fetched(store: Store) -> None:
    rows = await StoreClient(cast(RpcClient, store), disk_full_timeout_s=1.0).fetch(
        NAMES, with_prompt=False
    )
    assert [r.trajectory_id for r in rows] == NAMES


async def test_a_batch_larger_than_a_request_comes_in_its_order() -> None:
    store = Store(lambda reply: m.MAX_ITEMS)
    await fetched(store)
    assert store.asked == [4096, 4096, 4096, 4096, 3616]


@pytest.mark.parametrize("room", [1, 40, 400])
async def test_the_store_is_not_asked_again_and_again_for_what_has_no_room(room: int) -> None:
    """Long answers: each is looked up a few times, however many there are."""
    store = Store(lambda reply: room)
    await fetched(store)
    assert sum(store.asked) <= 2 * len(NAMES) + m.MAX_ITEMS


async def test_short_answers_after_long_ones_come_in_large_parts_again() -> None:
    store = Store(lambda reply: 10 if reply < 5 else m.MAX_ITEMS)
    await fetched(store)
    assert len(store.asked) < 25
