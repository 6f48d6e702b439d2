"""The limit of open files decides how many clients a server can have."""

import resource

import pytest

from laminar.config import ConfigError
from laminar.net import descriptors
from laminar.net.descriptors import SPARE, check_room, clients_allowed
from laminar.net.session import PEERS_MAX


@pytest.fixture
def limit(monkeypatch):
    """The soft and the hard limit of a process that is not this one."""
    now = [0, 0]

    def put(kind, limits):
        assert kind == resource.RLIMIT_NOFILE and limits[0] <= now[1] == limits[1]
        now[:] = limits

    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda kind: tuple(now))
    monkeypatch.setattr(descriptors.resource, "setrlimit", put)
    return now


def test_the_limit_is_raised_as_far_as_it_is_needed(limit):
    limit[:] = 1_024, 1 << 20
    assert clients_allowed() == PEERS_MAX
    assert limit == [PEERS_MAX + SPARE, 1 << 20]
    check_room(10_004)


def test_a_lower_hard_limit_is_used_whole_and_a_larger_run_is_refused(limit):
    limit[:] = 1_024, 4_096
    check_room(4_096 - SPARE)
    assert limit == [4_096, 4_096]
    words = r"10004 processes .* 4096 open files.*have 3840 clients.*16640 allow 16384"
    with pytest.raises(ConfigError, match=words):
        check_room(10_004)


def test_a_limit_that_is_high_enough_is_left_alone(limit):
    limit[:] = 1 << 20, 1 << 20
    assert clients_allowed() == PEERS_MAX
    assert limit == [1 << 20, 1 << 20]
