"""Pre-started nodes of `laminar train`, which import while the run is being checked.

Reads   the configuration
Starts  python -m laminar.cli.prefork_node
Writes  the words of a laminar-node to each, with the lock of the run's directory

The imports of the actors and those of the checks take seconds each, on a separate core each. If the
checks find a mistake, the processes are ended; they have written nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence

from laminar.actors.system.roles import collect_needs
from laminar.config import Config
from laminar.engines.environment import visible_gpus


class PreforkedNode:
    """Importing node daemon; `start_node` makes it join a run, `close` ends an unused one."""

    def __init__(self, config: Config, roles: Iterable[str]) -> None:
        """Start the process in a separate session, so that only its starter forwards Ctrl-C."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports = json.dumps(collect_needs(roles, config, gpus=bool(visible_gpus())))
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "laminar.cli.prefork_node", imports],
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        self._given = False

    def start_node(self, words: Sequence[str], lock_fd: int) -> subprocess.Popen[bytes]:
        """Start the node; its standard input stays open until `close` or this process's end."""
        socket.send_fds(self._socket, [json.dumps([*words]).encode()], [lock_fd])
        self._given = True
        return self._process

    def close(self) -> None:
        if not self._given:
            self._process.kill()
            self._process.wait()
        self._socket.close()
