"""A sandbox for code that a model has written, for tools and for reward functions.

Reads   programs in Python
Gives   Sandbox: run, one program; session, several that share their names. Ran: what was printed,
        and why it was stopped
Starts  sandbox_process.py, which has namespaces, a root, a user and limits of its own
Raises  NoSandbox, a ConfigError, where the kernel does not give all of it, which is tried when a
        Sandbox is made

What is covered, and what is not, stands in sandbox_process.py. The limits are for one process, and
for `processes` of them: a program can take memory_mb times processes. There is the standard library
and no other package.
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
from types import TracebackType
from typing import NamedTuple

from laminar.config import ConfigError
from laminar.names.process_end import describe_exit
from laminar.tasks.sandbox import sandbox_process
from laminar.tasks.sandbox.sandbox_process import DONE, LENGTH, LIMITS, MISSING, READY

START_S = 30.0  #: for the start of a sandbox, where many start at once
REAP_S = 2.0  #: for the end of its processes, which the kernel brings about
CHUNK = 1 << 16
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}


class _Permission:
    """What env.unsafe_local_code says, in a process that runs an environment; None in others."""

    unsafe: bool | None = None


def permit_unsafe(allowed: bool) -> None:
    """Whether code may run here without a sandbox, where there is none."""
    _Permission.unsafe = allowed


class NoSandbox(ConfigError):
    """A part of the sandbox is missing, which the reason names."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        else_ = (
            ""
            if _Permission.unsafe is None
            else (", or set env.unsafe_local_code = true to run it with the rights of this run")
        )
        super().__init__(
            f"code of the model cannot be isolated on this machine, which does not give {reason}; "
            f"use a machine or container that does{else_}"
        )


class Ran(NamedTuple):
    """What a program did."""

    output: str  #: what it printed, errors and the value of a last expression included
    stopped: str = ""  #: why it did not come to its end

    @property
    def text(self) -> str:
        """Both, for a model."""
        return f"{self.output}[{self.stopped}]" if self.stopped else self.output


class Sandbox:
    """Makes sandboxes of one kind; thread-safe."""

    def __init__(
        self,
        *,
        seconds: float = 5.0,
        memory_mb: int = 256,
        work_mb: int = 8,
        processes: int = 16,
        output_bytes: int = 1 << 16,
    ) -> None:
        """`seconds` of one program; `work_mb` of files in /work, the only folder to write to."""
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
            print(f"code of the model is not isolated: no {missing.reason}", file=sys.stderr)

    def run(self, program: str) -> Ran:
        """Run one program in a sandbox of its own."""
        with self.session() as session:
            return session.run(program)

    def session(self) -> CodeSession:
        """A sandbox for several programs, which find the names of those before."""
        return CodeSession(self)


def _find_program() -> str:
    """The compiled file, where Python keeps one: it was compared with its source at the import."""
    compiled = sandbox_process.__spec__ and sandbox_process.__spec__.cached
    return compiled if compiled and os.path.exists(compiled) else sandbox_process.__file__


class CodeSession:
    """One sandbox; one program at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start it; NoSandbox."""
        self._sandbox, self._ended = sandbox, ""
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
        self.pid = self._process.pid  #: of the process that is the parent of its pid 1
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
        """Run a program to its end, or until its time or room is used up: that ends the session."""
        if self._ended:
            return Ran("", self._ended)
        output, self._ended = self._run(program.encode(errors="replace"))
        if self._ended:
            self.close()
        return Ran(output.decode(errors="replace"), self._ended)

    def close(self) -> None:
        """End it and all that it has started; idempotent."""
        self._ended = self._ended or "the session has ended"
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, program: bytes) -> tuple[bytearray, str]:
        """What it printed, and why the session is over, if it is."""
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
                return output, ""
            if answer is not None:
                return output, self._describe_end()
            if self._output.fileno() in ready and not ready - {self._output.fileno()}:
                self._unregister_closed(poll)
        return output, late

    def _receive_status(self) -> bytes:
        """What the process says; nothing when it has ended, or has not read what it was told."""
        try:
            return self._channel.recv(1)
        except ConnectionResetError:
            return b""

    def _unregister_closed(self, poll: select.poll) -> None:
        """Code that closes its output is not to keep this process busy."""
        if select.select([self._output], [], [], 0)[0] and self._is_closed:
            poll.unregister(self._output)

    def _read(self, output: bytearray, most: int) -> None:
        """What has been printed, up to a byte more than may be."""
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
        """How the process of the code has ended; both processes above it end with it."""
        code = self._reap_process()
        return f"the program ended its process: {describe_exit(128 - code if code > 128 else code)}"

    def _reap_process(self) -> int:
        ready, _, _ = select.select([self._gone], [], [], REAP_S)  # wait with a time limit sleeps
        with contextlib.suppress(ProcessLookupError):
            if not ready or self._sandbox.limits["unsafe"]:
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def _find_missing_part(self) -> str:
        """The part without which it has not started; all of it is ended."""
        self._channel.close()
        code = self._reap_process()
        said = self._said.read().decode(errors="replace").strip()
        self.close()
        return said if code == MISSING else f"a process that starts ({describe_exit(code)}) {said}"
