"""The nodes of `laminar train`, started before there is a run: they import during the checks.

Reads   the configuration
Starts  python -m laminar.cli.prefork_node
Writes  the words of a laminar-node to each, with the lock of the run's directory

What the actors import and what the checks before a run import takes seconds each, on a core of its
own. If the checks find a mistake, the processes are ended; they have written nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence

from laminar.actors.system.roles import collect_needs
from laminar.config import Config
from laminar.engines.environment import visible_gpus


class PreforkedNode:
    """A node daemon that imports; `go` makes it one of a run, `close` ends one that is none."""

    def __init__(self, config: Config, roles: Sequence[str]) -> None:
        """Start the process in a session of its own: Ctrl-C is the starter's to hand on."""
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
        """The node; its standard input stays open until `close`, or the end of this process."""
        socket.send_fds(self._socket, [json.dumps([*words]).encode()], [lock_fd])
        self._given = True
        return self._process

    def close(self) -> None:
        if not self._given:
            self._process.kill()
            self._process.wait()
        self._socket.close()
