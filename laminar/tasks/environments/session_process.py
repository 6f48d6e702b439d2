"""The fork server of environment sessions: python -m laminar.tasks.environments.session_process FD.

Reads   messages on a socket of its parent: ForkServerStart, then ForkSession and KillSession
Gives   messages on that socket: ForkServerReady or ForkServerRefused, then SessionForked and
        SessionEnded; a Reply per request on the socket sent with ForkSession; output on stderr
Starts  a process for each ForkSession, which has imported the user's file already

A session holds the state of its environment and ends alone: a call that hangs is ended by SIGKILL,
and the other sessions continue. This process runs no user code after the import, so it can always
end a session. A session adopts the daemons that its tools start, and this process adopts and kills
what a session leaves behind. It runs under a guard (run/process_guard.py): when this process or the
pool's ends, all sessions end, with all that they and the import of the file have started.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from laminar.config import ConfigError
from laminar.names.process_end import describe_exit
from laminar.run.parent_death import die_with_parent
from laminar.run.process_guard import adopt_orphans, kill_children, list_children
from laminar.run.user_file import describe_error, replace_surrogates
from laminar.tasks.data.prompts import PromptRow, from_plain
from laminar.tasks.environments.user_class import RESET, REWARD, has_reward, load_class
from laminar.tasks.pipe_frames import encode_frame, read_frame
from laminar.tasks.rewards.results import RewardCall, RewardResult, RewardSpec, Scorer, call_guarded
from laminar.tasks.rewards.reward_functions import open_scorer
from laminar.tasks.sandbox.sandbox import permit_unsafe

MESSAGE_BYTES_MAX = 1 << 16  #: limit of a message; a file name and a reason are shorter

# --- between this process and its parent -----------------------------------------------------


class ForkServerStart(msgspec.Struct, tag="start"):
    path: str
    name: str
    unsafe: bool  #: code may run without a sandbox
    memory_mb: int = 0  #: memory limit of a session's process above this one's; 0: no limit
    reward: RewardSpec | None = None  #: functions that take the environment


class ForkSession(msgspec.Struct, tag="fork"):
    """An order to fork a session; sent with the session's socket."""

    number: int


class KillSession(msgspec.Struct, tag="kill"):
    number: int


class ForkServerReady(msgspec.Struct, tag="ready"):
    """A report that the class is loaded."""

    has_reward: bool  #: sessions give the reward


class ForkServerRefused(msgspec.Struct, tag="refused"):
    reason: str


class SessionForked(msgspec.Struct, tag="forked"):
    number: int
    pid: int


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


class TextReply(msgspec.Struct, tag="said"):
    text: str | None  #: result of reset or of a tool, or the error if `failed`
    failed: bool = False


class RewardReply(msgspec.Struct, tag="rated"):
    result: RewardResult


Request = ResetRequest | ToolRequest | RewardRequest
Reply = TextReply | RewardReply


def main(number: str) -> None:
    control = socket.socket(fileno=int(number))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    os.dup2(2, 1)
    start = msgspec.msgpack.decode(control.recv(MESSAGE_BYTES_MAX), type=ForkServerStart)
    permit_unsafe(start.unsafe)
    try:
        environment = load_class(start.path, start.name)
        live: list[Any] = []  #: the environment of a session, in its process
        scorer = open_scorer(start.reward, live) if start.reward is not None else None
    except ConfigError as error:
        control.send(msgspec.msgpack.encode(ForkServerRefused(str(error))))
        return
    rewards = has_reward(environment) or scorer is not None
    control.send(msgspec.msgpack.encode(ForkServerReady(rewards)))
    host = _EnvironmentHost(environment, start.path, live, scorer)
    _ForkServer(control, host, start).serve_forever()


class _ForkServer:
    """The loop that forks, kills and reaps session processes."""

    def __init__(
        self, control: socket.socket, host: _EnvironmentHost, start: ForkServerStart
    ) -> None:
        self._control, self._host, self._start = control, host, start
        self._numbers: dict[int, int] = {}  #: session numbers by process id
        self._imported = set[int]()  #: children that the import of the file has started
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        adopt_orphans()

    def serve_forever(self) -> None:
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap_sessions()
            if self._control.fileno() in ready and not self._handle_order():
                return

    def _handle_order(self) -> bool:
        """Handle an order; return False when the parent is gone."""
        try:
            body, sockets, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 1)
        except OSError:
            return False
        if not body:
            return False
        order = msgspec.msgpack.decode(body, type=ForkSession | KillSession)
        if isinstance(order, KillSession):
            for pid in [p for p, number in self._numbers.items() if number == order.number]:
                os.kill(pid, signal.SIGKILL)
            return True
        if not self._numbers:
            self._imported = list_children()
        parent, pid = os.getpid(), os.fork()
        if not pid:
            self._become_session(sockets[0], parent)
        os.close(sockets[0])
        self._numbers[pid] = order.number
        self._send_message(SessionForked(order.number, pid))
        return True

    def _become_session(self, channel: int, parent: int) -> None:
        """Run a session in the forked child, which never returns to the fork server's loop."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(parent)
            adopt_orphans()
            os.close(self._woken)
            self._control.close()
            _limit_memory(self._start.memory_mb)
            _serve_session(socket.socket(fileno=channel), self._host)
            code = 0
        except BaseException:  # not from user code, whose exceptions become replies
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(code)

    def _reap_sessions(self) -> None:
        for pid, number in list(self._numbers.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _, status = os.waitpid(pid, 0)
            del self._numbers[pid]
            kill_children(self._imported | self._numbers.keys())  # adopted from the session
            self._send_message(
                SessionEnded(number, describe_exit(os.waitstatus_to_exitcode(status)))
            )

    def _send_message(self, message: Any) -> None:
        with suppress(OSError):  # the parent is gone, which the next order reveals
            self._control.send(msgspec.msgpack.encode(message))


def _limit_memory(limit_mb: int) -> None:
    """Limit private writable memory, on top of that taken by the file's import.

    Reserved memory and mapped files are not counted. Each child has the same limit.
    """
    if not limit_mb:
        return
    with open("/proc/self/status") as status:
        (taken,) = (line.split()[1] for line in status if line.startswith("VmData:"))
    limit = int(taken) * 1024 + (limit_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


# --- in a session ----------------------------------------------------------------------------


def _serve_session(channel: socket.socket, session: _EnvironmentHost) -> None:
    """Answer requests, one at a time, until the channel ends."""
    requests = channel.makefile("rb")
    while (body := read_frame(requests)) is not None:
        reply = session.handle_request(msgspec.msgpack.decode(body, type=Request))
        channel.sendall(encode_frame(reply))


class _EnvironmentHost:
    """The user's environment object, and its rewards; its exceptions become replies."""

    def __init__(
        self, environment: type, path: str, live: list[Any], scorer: Scorer | None
    ) -> None:
        self._class, self._path = environment, path
        self._live, self._scorer = live, scorer
        self._runner: asyncio.Runner | None = None  #: created for the first async method

    def handle_request(self, request: Request) -> Reply:
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
        random.seed(request.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(request.seed % (1 << 32))
        self._object = self._class()
        self._live[:] = [self._object]
        row = request.row
        columns = {"prompt": row.prompt, **from_plain(row.columns)}
        reset = getattr(self._object, RESET)
        said = self._await_value(reset(**_select_accepted(reset, columns)))
        return None if said is None else replace_surrogates(str(said))

    def _call_tool(self, request: ToolRequest) -> str:
        method = getattr(self._object, request.tool)
        value = self._await_value(method(**json.loads(request.arguments)))
        return replace_surrogates(value if isinstance(value, str) else str(value))

    def _compute_reward(self, call: RewardCall | None) -> RewardResult:
        if call is not None and self._scorer is not None and not has_reward(self._class):
            return self._scorer(call)[0]
        return call_guarded(lambda: self._await_value(getattr(self._object, REWARD)()), self._path)

    def _await_value(self, value: Any) -> Any:
        """Return the value, awaiting it on a single event loop if the method is async."""
        if not inspect.isawaitable(value):
            return value
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_wait(value))


async def _wait(value: Any) -> Any:
    return await value


def _select_accepted(reset: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Select the columns that reset names, or all if it takes **row."""
    parameters = inspect.signature(reset).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


if __name__ == "__main__":
    main(sys.argv[1])
