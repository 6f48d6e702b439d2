"""Sessions of the user's environment for an asyncio process.

Reads   the user's file, by way of a process that has imported it (session_process.py)
Gives   SessionPool: open; SessionProcess: send_request, reset, kill
Raises  SessionDied if a session ends before its reply, AllSessionsDied if all others ended with it;
        TimeoutError; ConfigError if the file does not load

The output of the process goes to `on_output`. A process that dies takes its sessions with it; the
next `open` starts another one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from laminar.config import ConfigError
from laminar.config.tree import EnvConfig
from laminar.run.process_guard import guard_command
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.session_process import (
    MESSAGE_BYTES_MAX,
    ForkServerReady,
    ForkServerRefused,
    ForkServerStart,
    ForkSession,
    KillSession,
    Reply,
    Request,
    ResetRequest,
    SessionEnded,
    SessionForked,
    TextReply,
)
from laminar.tasks.pipe_frames import LENGTH, encode_frame
from laminar.tasks.rewards.results import RewardSpec
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S

LATE_S = 0.1  #: wait for a reply that was on its way when the process ended
REAP_S = 5.0  #: wait for the end of a process that was told to end
Output = Callable[[bytes], object]  #: callback for the output of sessions


class SessionDied(Exception):
    """The end of a session before its reply, or a failure to begin one."""


class AllSessionsDied(SessionDied):
    """The end of the fork server and its sessions, not caused by this session.

    The oldest session with a pending request is the suspect; it gets a plain SessionDied.
    """


class SessionProcess:
    """A process with an environment that handles a single request at a time."""

    def __init__(self, warm: _ForkServerClient, number: int, channel: socket.socket) -> None:
        self._warm, self._number, self._channel = warm, number, channel
        #: exception that `send_request` raises from then on
        self.ended: asyncio.Future[SessionDied] = asyncio.get_running_loop().create_future()
        self.pid = 0  #: process id, or 0 while unknown
        self.asked = False  #: a request is pending

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)

    async def send_request(self, request: Request, timeout_s: float) -> Reply:
        """Return the reply, or raise TimeoutError or SessionDied: then kill the session."""
        if self._writer.is_closing():
            raise await self._wait_for_end()
        self.asked = True
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(encode_frame(request))
                await self._writer.drain()
                head = await self._reader.readexactly(LENGTH.size)
                body = await self._reader.readexactly(LENGTH.unpack(head)[0])
        except (asyncio.IncompleteReadError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise await self._wait_for_end() from None
        self.asked = False
        reply: Reply = msgspec.msgpack.decode(body, type=Reply)
        return reply

    async def reset(self, row: PromptRow, seed: int, timeout_s: float) -> TextReply:
        """Send the first request and return reset's text; `failed` also on timeout or death."""
        try:
            said = await self.send_request(ResetRequest(row, seed), timeout_s)
        except TimeoutError:
            return TextReply(
                f"it took longer than env.tool_timeout_s = {timeout_s:g} s", failed=True
            )
        except SessionDied as died:
            return TextReply(f"its process ended ({died})", failed=True)
        assert isinstance(said, TextReply)
        return said

    def kill(self) -> None:
        """End the process and all that it has started; idempotent."""
        self._writer.close()
        self._warm.kill_session(self)

    def mark_ended(self, died: SessionDied) -> None:
        """Record the end of the process; its children may still hold the channel open."""
        self.ended.set_result(died)
        asyncio.get_running_loop().call_later(LATE_S, self._hang_up)

    def _hang_up(self) -> None:
        if not self._writer.is_closing():  # uvloop refuses to end a transport twice
            self._writer.transport.abort()

    async def _wait_for_end(self) -> SessionDied:
        await asyncio.wait({self.ended}, timeout=REAP_S)
        return self.ended.result() if self.ended.done() else SessionDied("it closed its channel")


class SessionPool:
    """The process with the user's file, and the sessions that are forked from it."""

    def __init__(
        self,
        path: str,
        name: str,
        *,
        unsafe_local_code: bool = False,
        memory_mb: int = 0,
        start_timeout_s: float = IMPORT_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        on_output: Output = len,
        reward: RewardSpec | None = None,
    ) -> None:
        """Create the pool; `memory_mb` limits each process of a session, 0 means no limit.

        `env` is added to the environment of the processes; `on_output` gets their output.
        `reward` are the functions that sessions call, because one takes the environment.
        """
        self.has_reward = False  #: sessions give the reward; known after the start
        reward = reward if reward is not None and reward.takes_environments else None
        self._start = msgspec.msgpack.encode(
            ForkServerStart(path, name, unsafe_local_code, memory_mb, reward)
        )
        self._start_timeout_s, self._on_output = start_timeout_s, on_output
        self._env = {**os.environ, **(env or {})}
        self._warm: _ForkServerClient | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def from_config(
        cls, env: EnvConfig, *, on_output: Output = len, reward: RewardSpec | None = None
    ) -> SessionPool:
        """Create a pool with the limits of the settings."""
        return cls(
            env.path,
            env.name,
            unsafe_local_code=env.unsafe_local_code,
            memory_mb=env.memory_mb,
            on_output=on_output,
            reward=reward,
        )

    async def start(self) -> None:
        """Import the user's file; raise ConfigError, SessionDied."""
        await self._ensure_server()

    async def open(self) -> SessionProcess:
        """Open a session, whose environment is not made yet; raise SessionDied."""
        try:
            warm = await self._ensure_server()
        except ConfigError as error:  # the file has changed since the start
            raise SessionDied(str(error)) from None
        return await warm.fork_session()

    async def close(self) -> None:
        """End all sessions and the process."""
        async with self._starting:
            warm, self._warm = self._warm, None
        if warm is not None:
            await warm.close()

    async def _ensure_server(self) -> _ForkServerClient:
        async with self._starting:
            if self._warm is None or self._warm.gone:
                warm = _ForkServerClient(self._env, self._on_output)
                try:
                    reply = await warm.start_server(self._start, self._start_timeout_s)
                except BaseException:
                    await warm.close()
                    raise
                if isinstance(reply, ForkServerRefused):
                    await warm.close()
                    raise ConfigError(reply.reason)
                self._warm, self.has_reward = warm, reply.has_reward
            return self._warm


class _ForkServerClient:
    """The parent's side of the fork server, the process with the user's file."""

    def __init__(self, env: Mapping[str, str], on_output: Output) -> None:
        self.gone = False
        self._loop = asyncio.get_running_loop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            fd, module = theirs.fileno(), "laminar.tasks.environments.session_process"
            self._process = subprocess.Popen(  # a guard, which ends with the fork server
                guard_command(fd, module, str(fd)),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._sessions: dict[int, SessionProcess] = {}
        self._number = 0
        self._told: asyncio.Future[ForkServerReady | ForkServerRefused] = self._loop.create_future()
        self._loop.add_reader(self._control.fileno(), self._receive_message)
        threading.Thread(target=self._drain_output, args=(on_output,), daemon=True).start()

    async def start_server(
        self, start: bytes, timeout_s: float
    ) -> ForkServerReady | ForkServerRefused:
        """Have the process import the file and return its report."""
        self._send(start)
        await asyncio.wait({self._told}, timeout=timeout_s)
        if not self._told.done():
            raise SessionDied(f"the environment's file was not imported within {timeout_s:g} s")
        return self._told.result()

    async def fork_session(self) -> SessionProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._number += 1
        number = self._number  # others may begin while this one connects
        session = SessionProcess(self, number, ours)
        await session.connect()
        with theirs:
            self._sessions[number] = session
            self._send(msgspec.msgpack.encode(ForkSession(number)), [theirs.fileno()])
        return session

    def kill_session(self, session: SessionProcess) -> None:
        if not session.ended.done():
            self._send(msgspec.msgpack.encode(KillSession(session._number)))

    async def close(self) -> None:
        """Close the connection, on which the process ends its sessions; then kill the process."""
        self._mark_lost("it was closed")
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, REAP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def _send(self, message: bytes, sockets: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [message], sockets or [])
        except OSError as error:  # BlockingIOError: a thousand unread orders
            self._mark_lost(
                f"the process of the environment accepts no requests ({error.strerror})"
            )

    def _receive_message(self) -> None:
        try:
            body = self._control.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            body = b""
        if not body:
            return self._mark_lost("the process that had imported its file has ended")
        told = msgspec.msgpack.decode(
            body, type=ForkServerReady | ForkServerRefused | SessionForked | SessionEnded
        )
        if isinstance(told, SessionForked):
            if (session := self._sessions.get(told.number)) is not None:
                session.pid = told.pid
        elif isinstance(told, SessionEnded):
            if (session := self._sessions.pop(told.number, None)) is not None:
                session.mark_ended(SessionDied(told.how))
        else:
            self._told.set_result(told)

    def _mark_lost(self, how: str) -> None:
        """Mark the process as lost; none of its sessions can be used any more."""
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if not self._told.done():
            self._told.set_exception(SessionDied(how))
            self._told.exception()  # mark as retrieved, as there may be no waiter
        sessions = self._sessions.values()
        suspect = next((session for session in sessions if session.asked), None)
        for session in sessions:
            session.mark_ended(SessionDied(how) if session is suspect else AllSessionsDied(how))
            with suppress(ProcessLookupError, PermissionError):
                if session.pid:
                    os.killpg(session.pid, signal.SIGKILL)
        self._sessions.clear()

    def _drain_output(self, on_output: Output) -> None:
        """Pass on the output in a thread, because it ends only with the last session."""
        assert self._process.stderr is not None
        with self._process.stderr as printed:
            while data := os.read(printed.fileno(), 1 << 16):
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(on_output, data)
