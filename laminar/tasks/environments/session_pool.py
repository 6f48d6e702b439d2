"""Sessions of the user's environment for an asyncio process.

Reads   the user's file, by way of a process that has imported it (session_process.py)
Gives   SessionPool: open; SessionProcess: send_request, reset, kill
Raises  ChildLost if a session ends before its reply, AllSessionsDied if all others ended with it;
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
from contextlib import suppress

from laminar.config import ConfigError
from laminar.config.tasks import AgentsConfig, EnvConfig
from laminar.run.child_channel import Channel, ChildLost, Forked
from laminar.run.child_process import Child, Output, spawn_child
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.session_process import (
    ForkServerStart,
    ForkSession,
    KillSession,
    Reply,
    Request,
    ResetRequest,
    SessionEnded,
    TextReply,
)
from laminar.tasks.rewards.results import RewardSpec
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S

ENVIRONMENTS = "laminar.tasks.environments.session_process"
AGENTS = "laminar.tasks.environments.agent_process"


class AllSessionsDied(ChildLost):
    """The end of the fork server and its sessions, not caused by this session.

    The oldest session with a pending request is the suspect; it gets a plain ChildLost.
    """


class SessionProcess(Channel):
    """The channel to a process with an environment, which handles a single request at a time."""

    def __init__(self, server: _ForkServerClient, number: int, end: socket.socket) -> None:
        super().__init__(end, Reply)
        self._server, self._number = server, number
        self.pid = 0  #: process id, or 0 while unknown
        self.asked = False  #: a request is pending

    async def send_request(self, request: Request, timeout_s: float | None = None) -> Reply:
        """Return the reply, or raise TimeoutError or ChildLost: then kill the session."""
        self.asked = True
        reply: Reply = await self.request_reply(request, timeout_s)
        self.asked = False
        return reply

    async def reset(self, row: PromptRow, seed: int, timeout_s: float) -> TextReply:
        """Send the first request and return reset's text; `failed` also on timeout or death."""
        try:
            said = await self.send_request(ResetRequest(row, seed), timeout_s)
        except TimeoutError:
            return TextReply(
                f"it took longer than env.tool_timeout_s = {timeout_s:g} s", failed=True
            )
        except ChildLost as died:
            return TextReply(f"its process ended ({died})", failed=True)
        assert isinstance(said, TextReply)
        return said

    def kill(self) -> None:
        """End the process and all that it has started; idempotent."""
        if not self.ended.done():
            self._server.channel.send(KillSession(self._number))

    def mark_ended(self, reason: ChildLost) -> None:
        """Record the end of the process; its children may still hold the channel open."""
        self.drain_output()
        self.end_channel(reason)


class SessionPool:
    """The process with the user's file, and the sessions that are forked from it."""

    def __init__(
        self,
        env: EnvConfig,
        *,
        agents: AgentsConfig | None = None,
        on_output: Output = len,
        reward: RewardSpec | None = None,
    ) -> None:
        """Create the pool, for agents if their settings are given; `on_output` gets the output.

        `reward` are the functions that sessions call, because one takes the environment.
        """
        self.has_reward = False  #: sessions give the reward; known after the start
        reward = reward if reward is not None and reward.takes_environments else None
        path, name, command = env.path, env.name, list[str]()
        if agents is not None:
            of_agent, _, function = agents.run.rpartition(":")
            path, name, command = of_agent or path, function or name, agents.command
        unsafe = env.unsafe_local_code
        self._start = ForkServerStart(path, name, unsafe, env.memory_mb, reward, command)
        self._module = ENVIRONMENTS if agents is None else AGENTS
        self._on_output = on_output
        self._warm: _ForkServerClient | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Import the user's file; raise ConfigError, ChildLost."""
        await self._ensure_server()

    async def open(self) -> SessionProcess:
        """Open a session, whose environment is not made yet; raise ChildLost."""
        try:
            warm = await self._ensure_server()
        except ConfigError as error:  # the file has changed since the start
            raise ChildLost(str(error)) from None
        return warm.fork_session()

    async def close(self) -> None:
        """End all sessions and the process."""
        async with self._starting:
            warm, self._warm = self._warm, None
        if warm is not None:
            await warm.close()

    async def _ensure_server(self) -> _ForkServerClient:
        async with self._starting:
            if self._warm is None or self._warm.channel.ended.done():
                warm = _ForkServerClient(self._module, self._on_output)
                late = "the environment's file was not imported"
                try:
                    facts = await warm.await_ready(IMPORT_TIMEOUT_S, self._start, late)
                except BaseException:
                    await warm.close()
                    raise
                self._warm, self.has_reward = warm, facts["has_reward"]
            return self._warm


class _ForkServerClient(Child):
    """The fork server, the process with the user's file, and its sessions."""

    def __init__(self, module: str, on_output: Output) -> None:
        spawned = spawn_child(module, guarded=True, stderr=subprocess.PIPE)
        super().__init__(
            spawned, Forked | SessionEnded, on_message=self._handle_report, on_output=on_output
        )
        self._sessions: dict[int, SessionProcess] = {}
        self._number = 0
        self.channel.ended.add_done_callback(self._end_sessions)

    def fork_session(self) -> SessionProcess:
        ours, theirs = socket.socketpair()
        self._number += 1
        session = self._sessions[self._number] = SessionProcess(self, self._number, ours)
        with theirs:
            self.channel.send(ForkSession(self._number), [theirs.fileno()])
        return session

    def _handle_report(self, report: Forked | SessionEnded) -> None:
        if isinstance(report, Forked):
            if (session := self._sessions.get(report.number)) is not None:
                session.pid = report.pid
        elif (session := self._sessions.pop(report.number, None)) is not None:
            session.mark_ended(ChildLost(report.how))

    def _end_sessions(self, ended: asyncio.Future[ChildLost]) -> None:
        """End all sessions, none of which can be used any more."""
        how = f"the process that had imported its file has ended: {ended.result()}"
        sessions = self._sessions.values()
        suspect = next((session for session in sessions if session.asked), None)
        for session in sessions:
            session.mark_ended(ChildLost(how) if session is suspect else AllSessionsDied(how))
            with suppress(ProcessLookupError, PermissionError):
                if session.pid:
                    os.killpg(session.pid, signal.SIGKILL)
        self._sessions.clear()
