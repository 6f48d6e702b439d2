"""A sandbox for model-written code, used by tools and reward functions.

Reads   programs in Python
Gives   Sandbox: `run` for a single program, `session` for several that share their names; Ran: the
        output, and the reason of an early stop
Starts  sandbox_process.py, which has separate namespaces, root, user and limits
Raises  NoSandbox, a ConfigError, if the kernel lacks a part of it; checked when a Sandbox is made

sandbox_process.py describes what is covered and what is not. The limits apply to each of at most
`processes` processes, so a program can take memory_mb times processes. Only the standard library is
available, without other packages.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from laminar.config import ConfigError
from laminar.names.process_end import describe_exit
from laminar.tasks.sandbox import sandbox_process
from laminar.tasks.sandbox.sandbox_process import DONE, LENGTH, LIMITS, MISSING, READY

START_S = 30.0  #: timeout of a sandbox's start, while many start at once
REAP_S = 2.0  #: timeout of the end of its processes, which the kernel brings about
CHUNK = 1 << 16
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}


class _Permission:
    """The value of env.unsafe_local_code in environment processes; None in others."""

    unsafe: bool | None = None


def permit_unsafe(allowed: bool) -> None:
    """Set whether code may run in this process without a sandbox if none is available."""
    _Permission.unsafe = allowed


class NoSandbox(ConfigError):
    """A missing part of the sandbox, named by `reason`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        else_ = (
            ""
            if _Permission.unsafe is None
            else (
                ", or set env.unsafe_local_code = true to run it with the permissions of this run"
            )
        )
        super().__init__(
            "model-written code cannot be isolated on this machine, which does not provide "
            f"{reason}; use a machine or container that does{else_}"
        )


class Ran(NamedTuple):
    """The outcome of a program."""

    output: str  #: output, including errors and the value of a last expression
    stop_reason: str | None = None  #: reason if the program was stopped early

    @property
    def text(self) -> str:
        """The output and the reason, for a model."""
        return f"{self.output}[{self.stop_reason}]" if self.stop_reason else self.output


class Sandbox:
    """A factory of sandboxes with the same limits; thread-safe."""

    def __init__(
        self,
        *,
        seconds: float = 5.0,
        memory_mb: int = 256,
        work_mb: int = 8,
        processes: int = 16,
        output_bytes: int = 1 << 16,
    ) -> None:
        """Set the limits: `seconds` per program, `work_mb` in /work, the only writable folder."""
        self.seconds, self.output_bytes = seconds, output_bytes
        self.limits = {
            "memory_mb": memory_mb,
            "work_mb": work_mb,
            "processes": processes,
            "unsafe": 0,
        }
        try:
            self.session().close()
        except NoSandbox as missing:
            if not _Permission.unsafe:
                raise
            self.limits["unsafe"] = 1
            print(f"model-written code is not isolated: no {missing.reason}", file=sys.stderr)

    def run(self, program: str) -> Ran:
        """Run a program in a new sandbox."""
        with self.session() as session:
            return session.run(program)

    def session(self) -> CodeSession:
        """Start a sandbox for several programs, each of which sees the names of earlier ones."""
        return CodeSession(self)


def _find_program() -> str:
    """Return the compiled file, checked against the source at import, if Python keeps one."""
    compiled = sandbox_process.__spec__ and sandbox_process.__spec__.cached
    return compiled if compiled and os.path.exists(compiled) else sandbox_process.__file__


class CodeSession:
    """A running sandbox, for a single program at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start the sandbox; raise NoSandbox."""
        self._sandbox = sandbox
        self._end_reason: str | None = None
        self._channel, theirs = socket.socketpair()
        python: str = getattr(sys, "_base_executable", sys.executable)
        limits = [str(sandbox.limits[name]) for name in LIMITS]
        with theirs:
            self._process = subprocess.Popen(
                [python, "-I", "-S", "-B", _find_program(), *limits],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd=Path(sandbox_process.__file__).anchor,
                start_new_session=True,
            )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.pid = self._process.pid  #: process id of the parent of the sandbox's pid 1
        self._gone = os.pidfd_open(self.pid)
        self._output, self._said = self._process.stdout, self._process.stderr
        os.set_blocking(self._output.fileno(), False)
        self._channel.settimeout(START_S)
        try:
            ready = self._channel.recv(1) == READY
        except OSError:  # TimeoutError is one
            ready = False
        if not ready:
            raise NoSandbox(self._find_missing_part())

    def run(self, program: str) -> Ran:
        """Run a program; if it exceeds its time or output limit, the session ends."""
        if self._end_reason:
            return Ran("", self._end_reason)
        output, self._end_reason = self._run(program.encode(errors="replace"))
        if self._end_reason:
            self.close()
        return Ran(output.decode(errors="replace"), self._end_reason)

    def close(self) -> None:
        """End the sandbox with all of its processes; idempotent."""
        self._end_reason = self._end_reason or "the session has ended"
        if self._gone < 0:
            return
        self._channel.close()
        self._reap_process()
        for file in (self._output, self._said):
            file.close()
        os.close(self._gone)
        self._gone = -1

    def __enter__(self) -> CodeSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, program: bytes) -> tuple[bytearray, str | None]:
        """Return the output, and the reason if the session has ended."""
        end = time.monotonic() + self._sandbox.seconds
        late = f"stopped after {self._sandbox.seconds:g} s"
        output, most = bytearray(), self._sandbox.output_bytes
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._output, select.POLLIN)
        try:
            self._channel.settimeout(self._sandbox.seconds)
            self._send(program)
        except TimeoutError:
            return output, late
        except OSError:
            return output, self._describe_end()
        while (left := end - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(left * 1000)}
            answer = self._receive_status() if self._channel.fileno() in ready else None
            self._read(output, most)
            if len(output) > most:
                return output[:most], f"stopped after {most} bytes of output"
            if answer == DONE:
                return output, None
            if answer is not None:
                return output, self._describe_end()
            if self._output.fileno() in ready and not ready - {self._output.fileno()}:
                self._unregister_closed(poll)
        return output, late

    def _receive_status(self) -> bytes:
        """Return the status byte; empty if the process has ended or left its input unread."""
        try:
            return self._channel.recv(1)
        except ConnectionResetError:
            return b""

    def _unregister_closed(self, poll: select.poll) -> None:
        """Stop polling an output that the code has closed, which would keep this process busy."""
        if select.select([self._output], [], [], 0)[0] and self._is_closed:
            poll.unregister(self._output)

    def _read(self, output: bytearray, most: int) -> None:
        """Append the available output, up to a byte more than the limit."""
        self._is_closed = False
        with contextlib.suppress(BlockingIOError):
            while len(output) <= most:
                part = os.read(self._output.fileno(), CHUNK)
                if not part:
                    self._is_closed = True
                    return
                output += part

    def _send(self, body: bytes) -> None:
        self._channel.sendall(LENGTH.pack(len(body)) + body)

    def _describe_end(self) -> str:
        """Describe how the code's process has ended; both processes above it end with it."""
        code = self._reap_process()
        return f"the program ended its process: {describe_exit(128 - code if code > 128 else code)}"

    def _reap_process(self) -> int:
        ready, _, _ = select.select([self._gone], [], [], REAP_S)  # wait(timeout) would poll
        with contextlib.suppress(ProcessLookupError):
            if not ready or self._sandbox.limits["unsafe"]:
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def _find_missing_part(self) -> str:
        """End a sandbox that has not started and return the name of the missing part."""
        self._channel.close()
        code = self._reap_process()
        said = self._said.read().decode(errors="replace").strip()
        self.close()
        return said if code == MISSING else f"a process that starts ({describe_exit(code)}) {said}"
