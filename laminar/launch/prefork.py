"""Pre-started nodes of `laminar train`, which import while the run is being checked.

Reads   the configuration
Starts  python -m laminar.cli.prefork_node
Writes  the words of a laminar-node to each, with the lock of the run's directory

The actors and the checks of model and data need the same imports, which take seconds. So a fork of
the process that has done them for the actors makes these checks, or this process if that is gone,
and the rows of a dataset are made here meanwhile. If the checks find a mistake, the processes are
ended; they have written nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence

from laminar.actors.system.roles import COMMON, Needs, collect_needs
from laminar.config import Config, ConfigError
from laminar.engines.environment import visible_gpus
from laminar.launch.preflight import RunPlan, look_at_data
from laminar.run.child_channel import BlockingChannel, Refused
from laminar.tasks.data.prompts import PromptSet, load_prompts


def answer_check(fd: int) -> None:
    """Make the checks that the process at the other end of this channel asks for, if it does."""
    channel = BlockingChannel(socket.socket(fileno=fd))
    if request := channel.receive(tuple[Config, PromptSet | None]):
        with channel.refuse_errors():
            channel.send_last([look_at_data(*request)])


class PreforkedNode:
    """Importing node daemon; `start_node` makes it join a run, `close` ends an unused one."""

    def __init__(self, config: Config, roles: Iterable[str]) -> None:
        """Start the process in a separate session, so that only its starter forwards Ctrl-C."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._checks, checks = socket.socketpair()
        needs = collect_needs(roles, config, gpus=bool(visible_gpus()))
        fds = [checks.fileno()] if COMMON in needs else []  # else both ends are closed
        if fds:
            need, call = needs[COMMON], f"{__name__}:{answer_check.__name__}:{fds[0]}"
            needs[COMMON] = Needs([*need.modules, call], need.environment, fds)
        with theirs, checks:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "laminar.cli.prefork_node", json.dumps(needs)],
                stdin=theirs.fileno(),
                pass_fds=fds,
                start_new_session=True,
            )
        self._given = False

    def look_at_data(self, config: Config) -> RunPlan:
        """Return the plan as the function of this name does, which the warm process calls."""
        channel = BlockingChannel(self._checks)
        is_made = bool(config.data.dataset) and not config.is_emulated
        prompts = load_prompts(config.data, with_columns=config.has_sessions) if is_made else None
        channel.send((config, prompts))
        reply = channel.receive(tuple[RunPlan] | Refused)
        if isinstance(reply, Refused):
            raise ConfigError(reply.reason)
        return reply[0] if reply else look_at_data(config, prompts)

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
