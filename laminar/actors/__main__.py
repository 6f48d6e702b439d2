"""Entry of an actor process, which a node starts.

python -m laminar.actors RUN_DIR NAME ROLE NODE ADDRESS
"""

from __future__ import annotations

import sys
from pathlib import Path

from laminar.actors.host import Actor, Host, run_actor


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
    run_dir, name, role, node, address = sys.argv[1:]
    sys.exit(run_actor(Path(run_dir), name, role, node, address, make))
