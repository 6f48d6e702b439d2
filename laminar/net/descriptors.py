"""The limit of open files: a server needs one per client, large runs exceed the default.

Reads   the limit of this process
Writes  the same limit, raised as far as permitted
Gives   clients_allowed, connection_limit; check_room, which raises ConfigError
"""

from __future__ import annotations

import resource

from laminar.config import ConfigError
from laminar.net.session import PEERS_MAX

SPARE = 256
"""Descriptors for this process's files, and for connections that are refused with a reason."""
RESERVE = 128  #: the part of SPARE that is for the log, checkpoints and forks, not for connections


def clients_allowed() -> int:
    """Return how many clients a server of this process can have, at most PEERS_MAX."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = PEERS_MAX + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return PEERS_MAX if soft == resource.RLIM_INFINITY else min(PEERS_MAX, soft - SPARE)


def connection_limit() -> int:
    """Return the number of open descriptors at which servers accept no connection."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (PEERS_MAX + SPARE if soft == resource.RLIM_INFINITY else soft) - RESERVE


def check_room(processes: int) -> None:
    """Raise ConfigError if a run of so many processes cannot all connect to one server."""
    allowed = clients_allowed()
    if processes <= allowed:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise ConfigError(
        f"a run of {processes} processes (run.nodes, rollout.replicas) is too large: with at most "
        f"{hard} open files, a server can have {allowed} clients; raise that limit "
        f"(ulimit -Hn; {PEERS_MAX + SPARE} allow {PEERS_MAX} clients) or use fewer replicas"
    )
