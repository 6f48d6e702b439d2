"""A run's secret for tests, and the keys of its sockets."""

from __future__ import annotations

from laminar.net.auth import RunKeys
from laminar.run.secret import SECRET_BYTES, Secret

SECRET = Secret(bytes(range(SECRET_BYTES)))
KEYS = RunKeys(SECRET)
