"""A warm process: imports the modules of actors in advance, so that actors are forked from it.

    python -m laminar.actors.system.warm_process FD NODE_PID NOTE [MODULE|MODULE:FUNCTION:FD]...

Reads   Launch messages of its node; each with two descriptors: the actor's standard input and its
        share of the run directory's lock
Gives   Ready once, then Forked or Refused for each Launch
Forks   a call of each FUNCTION with its descriptor; then actors, through a process that ends at
        once: they are children of the node, which sees their ends itself, and die with it. The
        death of a warm process ends no actor

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
from laminar.run.child_channel import BlockingChannel, Forked, Ready, Refused
from laminar.run.child_process import connect_parent
from laminar.run.lock import RunLock
from laminar.run.parent_death import die_with_parent

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


def main(fd: str, node_pid: str, note: str, *modules: str) -> int:
    end = connect_parent(fd, node_pid)
    _take_name("laminar-warm")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the node
    begun = time.monotonic()
    gc.disable()  # a fifth of the time of the imports
    missing = import_all(modules)
    reason = find_no_fork_reason()
    for call in (name for name in modules if ":" in name):
        _call_in_fork(call, can_fork=reason is None)
    if reason:
        if not modules:
            sys.exit(f"the warm process {reason} without any import")
        note = f"importing {', '.join(modules)} {reason}: each actor imports them itself"
        _exec_without_modules(end, node_pid, note)
    gc.collect()
    gc.freeze()  # children share these pages until a collection writes into them
    gc.enable()
    sys.stdout.flush()  # what is in a buffer would be written by every child
    sys.stderr.flush()
    node = BlockingChannel(end)
    node.send(
        Ready({"seconds": round(time.monotonic() - begun, 2), "missing": missing, "note": note})
    )
    actor = _serve_launches(node)
    return exit_codes.COMPLETE if actor is None else exit_process(_run_actor(actor, int(node_pid)))


def import_all(modules: Sequence[str]) -> list[str]:
    """Import modules; return the failures with their reasons."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name.partition(":")[0])
        except Exception as error:  # a module may raise anything
            missing.append(f"{name}: {type(error).__name__}: {error}"[:500])
    return missing


def _call_in_fork(call: str, *, can_fork: bool) -> None:
    """Call `module:function:descriptor` in a child and wait; a failure closes the descriptor."""
    module, function, fd = call.split(":")
    warm, pid = os.getpid(), _try_fork() if can_fork else -1
    if pid == 0:
        die_with_parent(warm)
        try:
            getattr(sys.modules[module], function)(int(fd))
        finally:
            os._exit(exit_codes.FAILED)
    os.close(int(fd))
    if pid > 0:
        os.waitpid(pid, 0)


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


def _exec_without_modules(end: socket.socket, node_pid: str, note: str) -> None:
    """Restart this program without modules, which ends all other threads."""
    end.set_inheritable(True)
    words = [str(end.fileno()), node_pid, note]
    os.execv(sys.executable, [*sys.orig_argv[:4], *words])


class _Actor(NamedTuple):
    """The descriptors and the launch of a just forked actor process."""

    launch: Launch
    warm: socket.socket
    stdin: int
    lock_fd: int


def _serve_launches(node: BlockingChannel) -> _Actor | None:
    """Fork actors until the node is gone; in an actor's process, return its launch."""
    while (launch := node.receive(Launch)) is not None:
        ours, theirs = socket.socketpair()
        between = _try_fork()
        if between == 0:
            node.socket.close()
            ours.close()
            _fork_and_end(theirs)  # only the actor returns
            return _Actor(launch, theirs, *node.descriptors)
        theirs.close()
        for fd in node.descriptors:
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


def _answer_launch(node: BlockingChannel, actor: socket.socket, between: int) -> None:
    """Report to the node, then let the actor begin; without the report it must not."""
    said = b""
    if between > 0:
        said = actor.recv(_PID.size)
        os.waitpid(between, 0)
    pid = _PID.unpack(said)[0] if said else between
    if pid <= 0:
        return node.send(Refused(os.strerror(-pid)))
    node.send(Forked(pid=pid))
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
