"""Child processes with a channel: start, handshake, output, the end of either side.

Starts  python -m MODULE FD PARENT ARGUMENT..., under a guard (process_guard.py) for user code
Gives   spawn_child, and Child for its result in an event loop; ChildProcess, for a child forked in
        any way; call_isolated; fork_child; in a child: connect_parent, connect_user_code
Raises  ConfigError with the reason of a child that refuses its start; ChildLost, with the last
        lines of its stderr if they are captured

Children are spawned, in 0.3 s, or, where many need the same imports, forked in 2 ms from a child
with one thread that has done them (actors/system/warm_process.py,
tasks/environments/session_process.py). multiprocessing.forkserver is as fast (13 ms, the first
0.5 s), but its children are those of the server: they outlive their parent, their exit codes are
lost with the server, and no guard ends the daemons of user code. There is one server per process,
with one set of imports, whose failures it hides. torch.multiprocessing also imports torch in each
child, in 4 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from laminar.config import ConfigError
from laminar.names.process_end import describe_exit
from laminar.run.child_channel import (
    MESSAGE_BYTES_MAX,
    BlockingChannel,
    Channel,
    ChildLost,
    Ready,
    Refused,
    make_garbage_error,
)
from laminar.run.parent_death import die_with_parent

END_S = 5.0  #: wait for the end of a process that was told to end
TAIL_BYTES, LAST_LINES, LAST_CHARS = 4096, 3, 300  #: limits of the output in a failure's reason
Output = Callable[[bytes], object]  #: callback for the stderr of a child


def print_output(data: bytes) -> None:
    """Pass the stderr of a child on to that of this process."""
    with suppress(OSError):
        os.write(2, data)


class Spawned(NamedTuple):
    """A started child, for which no event loop is needed yet."""

    pid: int
    socket: socket.socket  #: the parent's end of the channel
    stderr: IO[bytes] | None = None
    guarded: bool = False


def spawn_child(
    module: str,
    *words: str,
    guarded: bool = False,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> Spawned:
    """Start `python -m module` with the channel, the words and the descriptors.

    `guarded`: for user code, ended with all that it has started. `stderr`: as for Popen; output on
    subprocess.PIPE is read by Child."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        guard = ["laminar.run.process_guard", str(fd)] if guarded else []
        parent = "0" if guarded else str(os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *guard, module, str(fd), parent, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[fd, *descriptors],
            start_new_session=guarded,
        )
    process.returncode = 0  # its end is for ChildProcess, not for this object
    return Spawned(process.pid, ours, process.stderr, guarded)


# --- in the parent ------------------------------------------------------------------------------


class ChildProcess:
    """A child in a running event loop, like asyncio's Process but started in any way."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  #: exit code, or minus the signal that ended it
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._handle_exit)

    def _handle_exit(self) -> None:
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # reaped by another part of this process
            self.returncode = 255
        else:
            if found is None:
                return
            exited = found.si_code == os.CLD_EXITED
            self.returncode = found.si_status if exited else -found.si_status
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exit.set_result(self.returncode)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; do nothing if the child has ended."""
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:  # a zombie whose end is about to be reported
                pass

    def dump_stacks(self) -> None:
        self.send_signal(signal.SIGUSR2)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Child(ChildProcess):
    """A spawned child and its channel, which ends with it."""

    def __init__(
        self,
        spawned: Spawned,
        kind: Any,
        *,
        on_message: Callable[[Any], object] = id,
        on_output: Output = len,
        bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """`kind`: the type of its messages, apart from Ready and Refused."""
        super().__init__(spawned.pid)
        self.is_ready = False
        self.bytes_printed = 0
        self._spawned, self._on_output, self._tail = spawned, on_output, b""
        self.channel = Channel(
            spawned.socket, kind | Ready | Refused, on_message=on_message, bytes_max=bytes_max
        )
        self.channel.expect_reply()  # Ready or Refused
        if spawned.stderr is not None:
            os.set_blocking(spawned.stderr.fileno(), False)
            self._loop.add_reader(spawned.stderr, self._read_output, spawned.stderr)

    async def await_ready(
        self, timeout_s: float, start: Any = None, late: str = "it did not start"
    ) -> dict[str, Any]:
        """Send the first message, if any, and return the facts of Ready once the child is ready.

        Raises ConfigError if the child refuses; ChildLost, for `late` after the timeout."""
        if start is not None:
            self.channel.send(start)
        try:
            reply = await self.channel.wait_for_reply(timeout_s)
        except TimeoutError:
            raise ChildLost(f"{late} within {timeout_s:g} s") from None
        if isinstance(reply, Refused):
            raise ConfigError(reply.reason)
        if not isinstance(reply, Ready):
            raise make_garbage_error(reply)
        self.is_ready = True
        return reply.facts

    async def close(self, grace_s: float = END_S) -> None:
        """Close the channel and wait for the child to end by itself; then kill it."""
        self.channel.end_channel(ChildLost("it was closed"))
        await asyncio.wait({self._exit}, timeout=grace_s)
        await self.kill_tree()

    async def kill_tree(self) -> None:
        """Kill the child, and all that it has started if it has a guard; wait for its end."""
        if self._spawned.guarded:
            self.terminate()
            try:
                await asyncio.wait({self._exit}, timeout=END_S)
            finally:
                if self.returncode is None:
                    self._kill_group()
        self.kill()
        await self.wait()

    def describe_end(self) -> str:
        """Describe how it has ended, with the last lines of its captured stderr."""
        assert self.returncode is not None
        how = "ended with" if self.returncode >= 0 else "was"
        return f"it {how} {describe_exit(self.returncode)}{self.last_lines}"

    @property
    def last_lines(self) -> str:
        """The end of its captured stderr, after a colon; empty if there is none."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
        text = " | ".join([line for line in lines if line.strip("~^")][-LAST_LINES:])
        return f": {text[-LAST_CHARS:]}" if text else ""

    def _handle_exit(self) -> None:
        super()._handle_exit()
        if self.returncode is None:
            return
        if self._spawned.guarded:
            self._kill_group()  # processes left by user code; the id may be reused later
        if (stderr := self._spawned.stderr) is not None:
            while self._read_output(stderr):
                pass
            self._loop.remove_reader(stderr)
            stderr.close()
        self.channel.drain_output()
        self.channel.end_channel(ChildLost(self.describe_end()))

    def _read_output(self, stderr: IO[bytes]) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = os.read(stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(stderr)
            return False
        self.bytes_printed += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._on_output(data)
        return True

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def call_isolated(
    module: str,
    words: Sequence[str],
    limit_s: float,
    start: Any = None,
    *,
    late: str,
    ended: str,
    advice: str,
) -> dict[str, Any]:
    """Return the facts of a child that runs user code, after ending all that it has started.

    Raises ConfigError: the child's; `late` after the time limit; `ended` and `advice` if there is
    no reply."""
    spawned = spawn_child(module, *words, guarded=True, stderr=subprocess.DEVNULL)
    channel = BlockingChannel(spawned.socket)
    channel.socket.settimeout(limit_s)
    reply: Ready | Refused | ChildLost | None
    try:
        if start is not None:
            channel.send(start)
        reply = channel.receive(Ready | Refused)
    except TimeoutError:
        raise ConfigError(late) from None
    except ChildLost as garbage:
        reply = garbage
    finally:
        os.kill(spawned.pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(spawned.pid, 0)[1])
        channel.socket.close()
    if isinstance(reply, Refused):
        raise ConfigError(reply.reason)
    if not isinstance(reply, Ready):
        raise ConfigError(f"{ended} ({reply or describe_exit(code)}); {advice}")
    return reply.facts


# --- in the child -------------------------------------------------------------------------------


def connect_parent(fd: str, parent: str) -> socket.socket:
    """Return this end of the channel, given the first words of the command; die with the parent.

    `parent`: its process id; 0 if there is a guard, with which this process dies already."""
    if parent != "0":
        die_with_parent(int(parent))
    os.set_inheritable(int(fd), False)
    return socket.socket(fileno=int(fd))


def connect_user_code(fd: str, parent: str) -> BlockingChannel:
    """Return this end of the channel, and send what user code prints to stderr, line by line."""
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    os.dup2(2, 1)
    return BlockingChannel(connect_parent(fd, parent))


def fork_child(run: Callable[[], object]) -> int:
    """Fork a child that calls `run`, ends and dies with this process; return its pid.

    Signals are blocked in it: their handlers belong to the parent."""
    parent, code = os.getpid(), 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        if pid := os.fork():
            return pid
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        die_with_parent(parent)
        run()
        code = 0
    except BaseException:  # user code reports its exceptions itself
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)
