"""The lock of a run directory: each process holds a share; moving the directory takes all.

Reads   RUN/run.lock, RUN/processes/
Writes  RUN/run.lock (empty, locked), RUN/processes/HOST.PID (a card that describes a process and is
        locked by it), or RUN/processes/NAME for a name that only one process may have
Gives   RunLock, a process's share; lock_for_move, the whole; holders and list_processes, the live
        ones; try_lock, for any file
Raises  ConfigError with one sentence for a user; its subclass AlreadyServed if the run already has
        a process of a name that only one may have

Locks, not process ids, show whether a process lives, so that this works from any machine on a
shared file system. A child inherits the descriptor of its starter's share: at no moment is a run
alive and unlocked. A share belongs to one directory for good: if another run's directory takes
the path later, `find_lost_reason` says so.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from laminar.config import ConfigError
from laminar.run.command_line import shell_command
from laminar.run.directory import LOCK_FILE, PROCESSES_DIR
from laminar.run.permissions import open_private, restrict_umask

STOP = "stop"  #: name of a command that shares the lock without being a process of the run
MOVE_WAIT_S = 5.0  #: timeout for a process that moves the directory, which is one rename
ASK_WAIT_S = 0.5  #: timeout for a process that tests whether another one lives, which is one read
SOLE = ("coordinator", "serve")
"""Names that only one process of a run may have; its card is named after it."""
SOLE_WAIT_S = 2.0  #: timeout for a killed process of that name to disappear
_POLL_S = 0.02


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A live process of a run."""

    name: str  #: train, coordinator, node-0, store-0, ...
    host: str
    pid: int  #: process id in its pid namespace
    pids: str  #: pid namespace; the numbers of another one mean other processes

    @property
    def local(self) -> bool:
        """Whether this process can send signals to the holder."""
        return (self.host, self.pids) == (socket.gethostname(), _pid_namespace())


class AlreadyServed(ConfigError):
    """The run already has a process of this kind and needs no second one."""


class RunLock:
    """A process's share of a run directory's lock, released however the process ends."""

    def __init__(self, run_dir: Path, fd: int, name: str, *, inherited: bool = False) -> None:
        """Use `create`, `join` or `inherit`."""
        restrict_umask()  # of a process of the run
        self.run_dir, self.fd = run_dir, fd
        self.inherited = inherited  #: whether another process of the run started this one
        self._identity = _get_identity(os.fstat(fd))
        self._card: tuple[Path, int] | None = None
        if reason := self.find_lost_reason():
            os.close(fd)
            raise ConfigError(reason)
        self._write_card(name)

    @classmethod
    def create(cls, run_dir: Path, name: str) -> RunLock:
        """Lock a directory that was just made; ConfigError if another process has it already."""
        fd = _open(run_dir, os.O_EXCL)
        _wait_for_share(fd, run_dir)
        return cls(run_dir, fd, name)

    @classmethod
    def join(cls, run_dir: Path, name: str) -> RunLock:
        """Lock the directory of an existing run; wait while it is being moved."""
        if not run_dir.is_dir():
            raise ConfigError(f"run directory {run_dir} does not exist")
        fd = _open(run_dir)
        _wait_for_share(fd, run_dir)
        return cls(run_dir, fd, name)

    @classmethod
    def join_idle_run(cls, run_dir: Path, name: str) -> RunLock:
        """Lock a run that has no live process; ConfigError if one lives or starts."""
        fd = _open(run_dir)
        try:
            free = try_lock(fd, fcntl.LOCK_EX) and try_lock(fd, fcntl.LOCK_SH)
        except OSError as error:
            os.close(fd)
            raise _no_locks(run_dir, error) from None
        if not free:
            os.close(fd)
            raise ConfigError(in_use(run_dir))
        return cls(run_dir, fd, name)

    @classmethod
    def inherit(cls, run_dir: Path, name: str, fd: int | None) -> RunLock:
        """Take over the lock by an inherited descriptor; without one, `join`."""
        if fd is None:
            return cls.join(run_dir, name)
        os.set_inheritable(fd, False)
        return cls(run_dir, fd, name, inherited=True)

    def find_lost_reason(self) -> str | None:
        """Return why this directory is no longer the locked one; None while it still is."""
        path = self.run_dir / LOCK_FILE
        try:
            if _get_identity(os.stat(path)) == self._identity:
                return None
        except (FileNotFoundError, NotADirectoryError):
            what = f"{path} was removed" if self.run_dir.is_dir() else f"{self.run_dir} is gone"
            return f"the run directory {what}: a run ends with it"
        except OSError:
            return None  # a file system that does not respond proves nothing
        return f"the run directory {self.run_dir} belongs to another run now: this run ends"

    def close(self) -> None:
        """Release the share, as far as this process holds it."""
        with suppress(OSError):  # of a disk that fails: it would hide why this process ends
            os.close(self.fd)
        if self._card is None:
            return
        path, fd = self._card
        with suppress(OSError):
            if not self.find_lost_reason() and path.name not in SOLE:  # a waiting one has it open
                path.unlink(missing_ok=True)
        with suppress(OSError):
            os.close(fd)

    def _write_card(self, name: str) -> None:
        """Write the card that describes this process; without one if it cannot be written.

        ConfigError if another process has a name that only one may have.
        """
        holder = Holder(
            name=name, host=socket.gethostname(), pid=os.getpid(), pids=_pid_namespace()
        )
        sole = name in SOLE
        card = name if sole else f"{holder.host}.{holder.pid}"
        path = self.run_dir / PROCESSES_DIR / card
        try:
            path.parent.mkdir(exist_ok=True)
            fd = open_private(path)
            ours = _wait_for(fd, fcntl.LOCK_EX, SOLE_WAIT_S if sole else ASK_WAIT_S)
            if sole and not ours:
                os.close(fd)
                os.close(self.fd)
                raise AlreadyServed(_describe_sole_holder(self.run_dir, path))
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(holder), 0)
            self._card = (path, fd)
        except OSError:
            pass


@contextmanager
def lock_for_move(run_dir: Path) -> Iterator[None]:
    """Hold the whole lock: no process of the run lives or can start in the directory meanwhile.

    ConfigError if one lives, with its name and how to end it.
    """
    fd = _open(run_dir)
    try:
        try:
            whole = try_lock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise _no_locks(run_dir, error) from None
        if not whole:
            raise ConfigError(in_use(run_dir))
        if _is_moved(fd, run_dir):
            raise ConfigError(f"run directory {run_dir} was moved by another process just now")
        yield
    finally:
        os.close(fd)


def holders(run_dir: Path) -> list[Holder]:
    """Return the live processes of a run on all its machines, sorted by name."""
    try:
        cards = list((run_dir / PROCESSES_DIR).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [holder for path in cards if (holder := _read_live_holder(path)) is not None]
    return sorted(found, key=lambda holder: (holder.host, holder.name))


def list_processes(run_dir: Path) -> list[Holder]:
    """Return the processes of the run: all live holders but `laminar stop` commands."""
    return [holder for holder in holders(run_dir) if holder.name != STOP]


def in_use(run_dir: Path) -> str:
    """Return the error message for a directory whose run is alive."""
    living = holders(run_dir)
    if not living:
        path = run_dir / LOCK_FILE
        return (
            f"run directory {run_dir} is in use by a process that locks {path}, but all recorded "
            f"processes are dead: {_find_locker(path)}"
        )
    return (
        f"run directory {run_dir} is in use by {format_holders(living)}; "
        f"`{shell_command('stop', run_dir)}` ends a run"
    )


def _find_locker(path: Path) -> str:
    return f"`fuser -v {path}` on each machine names it"


def describe_dead_owner(path: Path, host: str, *pids: int) -> str:
    """Return what to do about a lock whose recorded owners are all dead; empty if one may live."""
    if host != socket.gethostname() or any(Path("/proc", str(pid)).exists() for pid in pids):
        return ""
    return f"; that process is dead here, so another one locks {path}: {_find_locker(path)}"


def _describe_sole_holder(run_dir: Path, card: Path) -> str:
    """Return the error message for a name that another process has."""
    holder = _read_live_holder(card)
    who = format_holders([holder]) if holder else f"the process that locks {card}"
    fix = f"; `{shell_command('stop', run_dir)}` ends the run"
    if holder and holder.local:
        fix = describe_dead_owner(card, holder.host, holder.pid) or fix
    return f"{run_dir} is served already, by {who}{fix}"


def format_holders(living: list[Holder]) -> str:
    """Return "coordinator (pid 7), node-0 (pid 8)", with the host of remote processes."""
    return ", ".join(
        f"{each.name} (pid {each.pid}{'' if each.local else f' on {each.host}'})" for each in living
    )


def _read_live_holder(card: Path) -> Holder | None:
    """Return the process that wrote the card, if it still has it locked."""
    try:
        fd = os.open(card, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if try_lock(fd, fcntl.LOCK_SH):
            return None
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except (OSError, msgspec.DecodeError):  # it is being written
        return None
    finally:
        os.close(fd)


def _open(run_dir: Path, flags: int = 0) -> int:
    path = run_dir / LOCK_FILE
    try:
        return open_private(path, flags)
    except FileExistsError:
        raise ConfigError(in_use(run_dir)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}") from None


def _wait_for_share(fd: int, run_dir: Path) -> None:
    """Wait for a share; a process that moves the directory holds all for one rename."""
    try:
        shared = _wait_for(fd, fcntl.LOCK_SH, MOVE_WAIT_S)
    except OSError as error:
        os.close(fd)
        raise _no_locks(run_dir, error) from None
    if not shared:
        os.close(fd)
        raise ConfigError(
            f"run directory {run_dir} was locked for {MOVE_WAIT_S:g} s by a process that moves it; "
            "try again"
        )


def _no_locks(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run directory {run_dir} is on a file system without file locks ({error.strerror}); "
        "choose another run.output_dir, or mount it with them"
    )


def _wait_for(fd: int, kind: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not try_lock(fd, kind):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def try_lock(fd: int, kind: int) -> bool:
    """Lock an open file without waiting; return whether that succeeded.

    OSError on a file system without locks.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_moved(fd: int, run_dir: Path) -> bool:
    try:
        return _get_identity(os.stat(run_dir / LOCK_FILE)) != _get_identity(os.fstat(fd))
    except FileNotFoundError:
        return True


def _get_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
