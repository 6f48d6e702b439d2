"""Entry of an actor process, which a node starts.

python -m laminar.actors RUN_DIR NAME ROLE NODE ADDRESS LOCK_FD
"""

from __future__ import annotations

import sys
from pathlib import Path

from laminar import exit_codes
from laminar.actors.host import Actor, Host, run_actor
from laminar.config import ConfigError
from laminar.run_lock import RunLock
from laminar.stop_requests import nohup_of_starter


def make(host: Host) -> Actor:
    """The actor of a role; each role imports only what it needs."""
    if host.role == "store":
        from laminar.actors.store import Store

        return Store(host)
    if host.role == "relay":
        from laminar.actors.relay import Relay

        return Relay(host)
    if host.role == "trainer":
        from laminar.actors.trainer import Trainer

        return Trainer(host)
    from laminar.actors.rollout import Rollout

    return Rollout(host)


if __name__ == "__main__":
    nohup_of_starter()
    run_dir, name, role, node, address, lock_fd = sys.argv[1:]
    try:
        lock = RunLock.inherit(Path(run_dir), name, int(lock_fd))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(exit_codes.USER_ERROR)
    sys.exit(run_actor(lock, name, role, node, address, make))
