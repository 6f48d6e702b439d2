"""Pre-started laminar-node: imports before it knows its run; started by `laminar train`.

    python -m laminar.cli.prefork_node NEEDS

Reads   the imports of its warm processes (JSON); on standard input, a socket, the words of a
        laminar-node with the descriptor of the lock of its run's directory
Starts  the warm processes; then becomes the laminar-node, or ends with its starter
"""

from __future__ import annotations

import json
import os
import socket
import sys

from laminar.actors.system.roles import Needs
from laminar.actors.system.warm import prestart_child
from laminar.launch.exit_handling import exit_code
from laminar.names import exit_codes

WORDS_MAX = 64 << 10  #: bytes


def main() -> int:
    found = json.loads(sys.argv[1])
    seeds = {kind: prestart_child(Needs(*need)) for kind, need in found.items()}
    for fd in (fd for need in found.values() for fd in Needs(*need).fds):
        os.close(fd)
    from laminar.cli import node  # after the start of what takes longest

    with socket.socket(fileno=os.dup(0)) as starter:
        message, fds, _, _ = socket.recv_fds(starter, WORDS_MAX, 1)
    if not message:  # the warm processes end with this process
        return exit_codes.COMPLETE
    return node.run_node([*json.loads(message), "--lock-fd", str(fds[0])], seeds)


if __name__ == "__main__":
    sys.exit(exit_code("laminar-node", main, daemon=True))
