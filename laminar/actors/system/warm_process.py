"""A warm process: imports the modules of actors in advance, so that actors are forked from it.

    python -m laminar.actors.system.warm_process FD NOTE MODULE...

Reads   Launch messages of its node on the socket FD; each with two descriptors: the actor's
        standard input and its share of the run directory's lock
Gives   WarmReady once, then Forked or ForkRefused for each Launch
Forks   actors, through a process that ends at once: they are children of the node, which sees
        their ends itself, and die with it. The death of a warm process ends no actor

A fork copies one thread. Locks that another one holds would stay locked in the child, so a process
with several threads forks nothing. If an import has started threads or initialised CUDA, which no
child could use, the process restarts without imports and reports that; then each actor imports for
itself. It opens no connection. Failed imports are left to the actor that needs them, which can
report the error in the run.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from laminar.actors.system.process import run_actors
from laminar.actors.system.roles import make_actor
from laminar.config import ConfigError
from laminar.names import exit_codes
from laminar.names.ports import find_transient
from laminar.run.lock import RunLock
from laminar.run.parent_death import die_with_parent

MESSAGE_MAX = 64 << 10
"""Bytes. A launch has only the variables that differ from the node's, a handful."""
_PID = struct.Struct("<i")
_GO = b"+"


class Launch(msgspec.Struct, tag="launch", frozen=True, kw_only=True):
    """An actor to be forked."""

    run_dir: str
    name: str
    role: str
    node: str
    address: str
    environment: dict[str, str | None]  #: differences from the warm process; None: unset
    #: further actors of this role, in the same process
    beside: tuple[str, ...] = ()


class WarmReady(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The warm process accepts launches now."""

    seconds: float  #: duration of the imports
    note: str  #: for people: why nothing was imported; else empty
    missing: list[str]  #: failed imports, with the reason


class Forked(msgspec.Struct, tag="forked", frozen=True, kw_only=True):
    """The actor is a child of the node now, and begins once the node has this message."""

    pid: int


class ForkRefused(msgspec.Struct, tag="refused", frozen=True, kw_only=True):
    """The actor's process could not be created."""

    reason: str


Answer = WarmReady | Forked | ForkRefused


def main(fd: str, note: str, *modules: str) -> int:
    node_pid = os.getppid()
    die_with_parent(node_pid)
    _take_name("laminar-warm")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the node
    node = socket.socket(fileno=int(fd))
    begun = time.monotonic()
    missing = import_all(modules)
    if reason := find_no_fork_reason():
        if not modules:
            sys.exit(f"the warm process {reason} without any import")
        _exec_without_modules(
            fd, f"importing {', '.join(modules)} {reason}: each actor imports them itself"
        )
    gc.collect()
    gc.freeze()  # children share these pages until a collection writes into them
    sys.stdout.flush()  # what is in a buffer would be written by every child
    sys.stderr.flush()
    actor = _serve_launches(
        node, WarmReady(seconds=time.monotonic() - begun, note=note, missing=missing)
    )
    return exit_codes.COMPLETE if actor is None else exit_process(_run_actor(actor, node_pid))


def import_all(modules: Sequence[str]) -> list[str]:
    """Import modules; return the failures with their reasons."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything
            missing.append(f"{name}: {type(error).__name__}: {error}"[:500])
    return missing


def find_no_fork_reason() -> str | None:
    """Return why this process cannot have children; None: it can."""
    if threads := _other_threads():
        return f"has started threads ({threads})"
    torch = sys.modules.get("torch")
    return "has initialized CUDA" if torch is not None and torch.cuda.is_initialized() else None


def _other_threads() -> str:
    names = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                names.append((task / "comm").read_text().strip())
    return ", ".join(sorted(names))


def _exec_without_modules(fd: str, note: str) -> None:
    """Restart this program without modules, which ends all other threads."""
    program = [sys.executable, "-m", "laminar.actors.system.warm_process", fd, note]
    os.execv(sys.executable, program)


class _Actor(NamedTuple):
    """The descriptors and the launch of a just forked actor process."""

    launch: Launch
    warm: socket.socket
    stdin: int
    lock_fd: int


def _serve_launches(node: socket.socket, ready: WarmReady) -> _Actor | None:
    """Fork actors until the node is gone; in an actor's process, return its launch."""
    with contextlib.suppress(ConnectionError):
        _send(node, ready)
        while True:
            message, fds, _, _ = socket.recv_fds(node, MESSAGE_MAX, 2)
            if not message:
                break
            launch = msgspec.msgpack.decode(message, type=Launch)
            ours, theirs = socket.socketpair()
            between = _try_fork()
            if between == 0:
                node.close()
                ours.close()
                _fork_and_end(theirs)  # only the actor returns
                return _Actor(launch, theirs, *fds)
            theirs.close()
            for fd in fds:
                os.close(fd)
            with ours:
                _answer_launch(node, ours, between)
    return None


def _try_fork() -> int:
    """Call os.fork; return -errno if that fails."""
    try:
        return os.fork()
    except OSError as error:
        return -int(error.errno or 1)


def _answer_launch(node: socket.socket, actor: socket.socket, between: int) -> None:
    """Report to the node, then let the actor begin; without the report it must not."""
    said = b""
    if between > 0:
        said = actor.recv(_PID.size)
        os.waitpid(between, 0)
    pid = _PID.unpack(said)[0] if said else between
    if pid <= 0:
        return _send(node, ForkRefused(reason=os.strerror(-pid)))
    _send(node, Forked(pid=pid))
    with contextlib.suppress(OSError):  # it has ended already, which the node sees
        actor.send(_GO)


def _fork_and_end(warm: socket.socket) -> None:
    """Fork and end this process; returns in the child, which the node adopts."""
    pid = _try_fork()
    if pid:
        warm.send(_PID.pack(pid))
        os._exit(0)


def _run_actor(actor: _Actor, node_pid: int) -> int:
    """Run the actor and return its exit code."""
    launch = actor.launch
    with actor.warm:
        if not actor.warm.recv(1):  # the warm process ended before it reported this one
            return exit_codes.FAILED
    die_with_parent(node_pid)  # the node, which has adopted this process by now
    os.dup2(actor.stdin, 0)
    os.close(actor.stdin)
    _apply_launch(launch)
    try:
        lock = RunLock.inherit(Path(launch.run_dir), launch.name, actor.lock_fd)
        names = (launch.name, *launch.beside)
        return run_actors(lock, names, launch.role, launch.node, launch.address, make_actor)
    except (ConfigError, OSError) as error:
        failed = find_transient(error) is not None
        if not (failed or isinstance(error, ConfigError)):
            raise
        print(f"{launch.name}: {error}", file=sys.stderr)
        return exit_codes.LOG_UNWRITABLE if failed else exit_codes.USER_ERROR


def exit_process(code: int) -> NoReturn:
    """End this process without tearing down its modules, like multiprocessing's children.

    Teardown would cost each actor a third of a second of a core, all of them at the same time.
    """
    atexit._run_exitfuncs()  # writes out logs
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _apply_launch(launch: Launch) -> None:
    """Set the process name, environment and random seed of an actor."""
    _take_name(launch.name)
    for variable, value in launch.environment.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    if numpy := sys.modules.get("numpy"):  # Python's own generator is reseeded automatically
        numpy.random.seed()


def _take_name(name: str) -> None:
    """Set the name that `ps -e` and `top` show; the command line is the same for all."""
    Path("/proc/self/comm").write_text(name)


def _send(node: socket.socket, answer: Answer) -> None:
    node.send(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
