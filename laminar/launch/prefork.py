"""Pre-started nodes of `laminar train`, which import while the run is being checked.

Reads   the configuration
Starts  python -m laminar.cli.prefork_node
Writes  the words of a laminar-node to each, with the lock of the run's directory

The actors and the checks of model and data need the same imports, which take seconds. So a fork of
the process that has done them for the actors makes these checks; this process, if there is none. If
the checks find a mistake, the processes are ended; they have written nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence

import msgspec

from laminar.actors.system.roles import COMMON, Needs, collect_needs
from laminar.config import Config, ConfigError
from laminar.engines.environment import visible_gpus
from laminar.launch.preflight import RunPlan, look_at_data
from laminar.run.child_channel import BlockingChannel, ChildLost, Refused


class CheckRequest(msgspec.Struct, tag="check", frozen=True):
    """The arguments of look_at_data."""

    config: Config
    known_digest: str


class Checked(msgspec.Struct, tag="checked", frozen=True):
    plan: RunPlan


def answer_check(fd: int) -> None:
    """Make the checks that the process at the other end of this channel asks for, if it does."""
    channel = BlockingChannel(socket.socket(fileno=fd))
    if (request := channel.receive(CheckRequest)) is not None:
        with channel.refuse_errors():
            channel.send_last(Checked(look_at_data(request.config, request.known_digest)))


class PreforkedNode:
    """Importing node daemon; `start_node` makes it join a run, `close` ends an unused one."""

    def __init__(self, config: Config, roles: Iterable[str]) -> None:
        """Start the process in a separate session, so that only its starter forwards Ctrl-C."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._checks, checks = socket.socketpair()
        needs = collect_needs(roles, config, gpus=bool(visible_gpus()))
        if warm := needs.get(COMMON):
            call = f"{__name__}:{answer_check.__name__}:{checks.fileno()}"
            needs[COMMON] = Needs([*warm.modules, call], warm.environment, [checks.fileno()])
        with theirs, checks:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "laminar.cli.prefork_node", json.dumps(needs)],
                stdin=theirs.fileno(),
                pass_fds=[checks.fileno()],
                start_new_session=True,
            )
        self._given = False

    def look_at_data(self, config: Config, known_digest: str = "") -> RunPlan:
        """Return the plan as the function of this name does, which the warm process calls."""
        channel = BlockingChannel(self._checks)
        channel.send(CheckRequest(config, known_digest))
        try:
            reply = channel.receive(Checked | Refused)
        except ChildLost:  # the package was replaced meanwhile
            reply = None
        if isinstance(reply, Refused):
            raise ConfigError(reply.reason)
        return reply.plan if reply is not None else look_at_data(config, known_digest)

    def start_node(self, words: Sequence[str], lock_fd: int) -> subprocess.Popen[bytes]:
        """Start the node; its standard input stays open until `close` or this process's end."""
        self._checks.close()
        socket.send_fds(self._socket, [json.dumps([*words]).encode()], [lock_fd])
        self._given = True
        return self._process

    def close(self) -> None:
        if not self._given:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._checks.close()
