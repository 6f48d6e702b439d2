"""The fork server of environment sessions, started by run/child_process.py.

Reads   messages of its parent: ForkServerStart, then ForkSession and KillSession
Gives   Ready or Refused, then Forked and SessionEnded; a Reply per request on the channel whose
        descriptor comes with ForkSession; output on stderr
Starts  a process for each ForkSession, which has imported the user's file already

A session holds the state of its environment and ends alone: a call that hangs is ended by SIGKILL,
and the other sessions continue. This process runs no user code after the import, so it can always
end a session. A session adopts the daemons that its tools start, and this process adopts and kills
what a session leaves behind. It runs under a guard (run/process_guard.py): when this process or the
pool's ends, all sessions end, with all that they and the import of the file have started.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from laminar.names.process_end import describe_exit
from laminar.run.child_channel import BlockingChannel, Forked, Ready
from laminar.run.child_process import connect_user_code, fork_child
from laminar.run.memory_limit import limit_memory
from laminar.run.process_guard import adopt_orphans, kill_children, list_children
from laminar.run.user_file import describe_error, replace_surrogates
from laminar.tasks.data.prompts import PromptRow, from_plain
from laminar.tasks.environments.user_class import RESET, REWARD, has_reward, load_class
from laminar.tasks.rewards.results import (
    Awaiter,
    RewardCall,
    RewardResult,
    RewardSpec,
    Scorer,
    call_guarded,
    select_accepted,
)
from laminar.tasks.rewards.reward_functions import open_scorer
from laminar.tasks.sandbox.sandbox import permit_unsafe

# --- between this process and its parent -----------------------------------------------------


class ForkServerStart(msgspec.Struct, tag="start"):
    path: str
    name: str  #: class of the environment, or function of the agent
    unsafe: bool  #: code may run without a sandbox
    memory_mb: int = 0  #: memory limit of a session's process above this one's; 0: no limit
    reward: RewardSpec | None = None  #: functions that take the environment
    command: list[str] = []  #: program of the agent, in place of a function


class ForkSession(msgspec.Struct, tag="fork"):
    """An order to fork a session; sent with the descriptor of its channel."""

    number: int


class KillSession(msgspec.Struct, tag="kill"):
    number: int


class SessionEnded(msgspec.Struct, tag="ended"):
    number: int
    how: str


# --- between a session and the process that uses it ------------------------------------------


class ResetRequest(msgspec.Struct, tag="reset"):
    """A session's first request: make the environment and reset it."""

    row: PromptRow
    seed: int  #: seed of Python's random numbers, and of NumPy's if it is imported


class ToolRequest(msgspec.Struct, tag="use"):
    tool: str
    arguments: str  #: JSON


class RewardRequest(msgspec.Struct, tag="rate"):
    """A request for the result of get_reward, or else of functions that take the environment."""

    call: RewardCall | None = None


class AgentRequest(msgspec.Struct, tag="agent"):
    """A session's only request: run the agent to its end."""

    row: PromptRow
    seed: int
    model: str  #: name that the agent is told
    base_url: str
    api_key: str
    directory: str = ""  #: working directory, if it is a command


class TextReply(msgspec.Struct, tag="said"):
    text: str | None  #: result of reset or of a tool, or the error if `failed`
    failed: bool = False


class RewardReply(msgspec.Struct, tag="rated"):
    result: RewardResult


class AgentReply(msgspec.Struct, tag="done"):
    """The end of the agent."""

    result: RewardResult  #: unscored: the agent returned None


Request = ResetRequest | ToolRequest | RewardRequest | AgentRequest
Reply = TextReply | RewardReply | AgentReply


Serve = Callable[[BlockingChannel], None]


def main(fd: str, parent: str) -> None:
    run_fork_server(fd, parent, _load_environment)


def run_fork_server(
    fd: str, parent: str, load: Callable[[ForkServerStart], tuple[Serve, bool]]
) -> None:
    """Fork sessions of what `load` imports: the code that serves one, and whether it rewards."""
    control = connect_user_code(fd, parent)
    if (start := control.receive(ForkServerStart)) is None:
        return
    permit_unsafe(start.unsafe)
    with control.refuse_errors():
        serve, rewards = load(start)
    control.send(Ready({"has_reward": rewards}))
    _ForkServer(control, serve, start.memory_mb).serve_forever()


def _load_environment(start: ForkServerStart) -> tuple[Serve, bool]:
    live: list[Any] = []  #: the environment of a session, in its process
    environment = load_class(start.path, start.name)
    scorer = open_scorer(start.reward, live) if start.reward is not None else None
    host = _EnvironmentHost(environment, start.path, live, scorer)
    return host.serve_session, has_reward(environment) or scorer is not None


class _ForkServer:
    """The loop that forks, kills and reaps session processes."""

    def __init__(self, control: BlockingChannel, serve: Serve, memory_mb: int) -> None:
        self._control, self._serve, self._memory_mb = control, serve, memory_mb
        self._numbers: dict[int, int] = {}  #: session numbers by process id
        self._imported = set[int]()  #: children that the import of the file has started
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        adopt_orphans()

    def serve_forever(self) -> None:
        gc.collect()
        gc.freeze()  # or each session's collections would copy all pages of what was imported
        control = self._control.socket.fileno()
        while True:
            ready, _, _ = select.select([control, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap_sessions()
            if control in ready and not self._handle_order():
                return

    def _handle_order(self) -> bool:
        """Handle an order; return False when the parent is gone."""
        order = self._control.receive(ForkSession | KillSession)
        if order is None:
            return False
        if isinstance(order, KillSession):
            for pid in [p for p, number in self._numbers.items() if number == order.number]:
                os.kill(pid, signal.SIGKILL)
            return True
        if not self._numbers:
            self._imported = list_children()
        (channel,) = self._control.descriptors
        pid = fork_child(lambda: self._run_session(channel))
        os.close(channel)
        self._numbers[pid] = order.number
        self._control.send(Forked(pid=pid, number=order.number))
        return True

    def _run_session(self, channel: int) -> None:
        """Serve a session in the forked child, until its channel ends."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setsid()
        adopt_orphans()
        os.close(self._woken)
        self._control.socket.close()
        limit_memory(self._memory_mb)
        self._serve(BlockingChannel(socket.socket(fileno=channel)))

    def _reap_sessions(self) -> None:
        for pid, number in list(self._numbers.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _, status = os.waitpid(pid, 0)
            del self._numbers[pid]
            kill_children(self._imported | self._numbers.keys())  # adopted from the session
            self._control.send(
                SessionEnded(number, describe_exit(os.waitstatus_to_exitcode(status)))
            )


# --- in a session ----------------------------------------------------------------------------


class _EnvironmentHost:
    """The user's environment object, and its rewards; its exceptions become replies."""

    def __init__(
        self, environment: type, path: str, live: list[Any], scorer: Scorer | None
    ) -> None:
        self._class, self._path = environment, path
        self._live, self._scorer = live, scorer
        self._settle = Awaiter()

    def serve_session(self, channel: BlockingChannel) -> None:
        channel.serve_requests(ResetRequest | ToolRequest | RewardRequest, self._handle_request)

    def _handle_request(self, request: ResetRequest | ToolRequest | RewardRequest) -> Reply:
        if isinstance(request, RewardRequest):
            return RewardReply(self._compute_reward(request.call))
        try:
            value = (
                self._reset(request)
                if isinstance(request, ResetRequest)
                else self._call_tool(request)
            )
        except BaseException as error:  # SystemExit too is the method's own failure
            return TextReply(describe_error(error, self._path), failed=True)
        return TextReply(value)

    def _reset(self, request: ResetRequest) -> str | None:
        seed_random(request.seed)
        self._object = self._class()
        self._live[:] = [self._object]
        row = request.row
        columns = {"prompt": row.prompt, **from_plain(row.columns)}
        reset = getattr(self._object, RESET)
        said = self._settle(reset(**select_accepted(reset, columns)))
        return None if said is None else replace_surrogates(str(said))

    def _call_tool(self, request: ToolRequest) -> str:
        method = getattr(self._object, request.tool)
        value = self._settle(method(**json.loads(request.arguments)))
        return replace_surrogates(value if isinstance(value, str) else str(value))

    def _compute_reward(self, call: RewardCall | None) -> RewardResult:
        if call is not None and self._scorer is not None and not has_reward(self._class):
            return self._scorer(call)[0]
        return call_guarded(lambda: self._settle(getattr(self._object, REWARD)()), self._path)


def seed_random(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))


if __name__ == "__main__":
    main(*sys.argv[1:])
