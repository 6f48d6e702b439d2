"""Sockets of a test, which are closed after it."""

import pytest


@pytest.fixture
def opened():
    sockets = []
    yield lambda one: sockets.append(one) or one
    for one in sockets:
        one.close()
