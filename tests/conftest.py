"""For all tests: signals have their defaults, however pytest was started; what shares a worker.

A background job ignores SIGINT, and nohup makes SIGHUP ignored; processes inherit that, and ours
respect it. What they do without it is what the tests are about.
"""

from __future__ import annotations

import signal

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_itemcollected(item: pytest.Item) -> None:
    """With --dist loadgroup: a file stays with one worker, and so do the users of one run."""
    shared = "finished" in getattr(item, "fixturenames", ())
    group = "finished" if shared else item.nodeid.partition("::")[0]
    item.add_marker(pytest.mark.xdist_group(group))
