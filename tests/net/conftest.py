"""Sockets of a test, which are closed after it, and the wait for what they bring."""

import asyncio

import pytest

DEADLINE_S = 150.0  #: only a hang reaches it


@pytest.fixture
def opened():
    sockets = []
    yield lambda one: sockets.append(one) or one
    for one in sockets:
        one.close()


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
