"""The lock of a run directory: each process of a run has a share, and who moves it needs all.

Reads   RUN/run.lock, RUN/processes/
Writes  RUN/run.lock (empty, locked), RUN/processes/HOST.PID (who that process is; locked by it),
        or RUN/processes/NAME for a name that only one process may have
Gives   RunLock, a process's share; moving, the whole; holders, who has a share; try_lock, of any
        file
Raises  ConfigError with one sentence for a user; AlreadyServed, one of them, where the run has a
        process of a name that only one may have

Whether a process lives is decided by its locks, never by its number, so a directory on a shared
file system is recognised from any machine. A child inherits the descriptor of its starter's
share: there is no moment in which a run lives and nothing is locked. A share names one directory
for good: what has its path later is another run's, and `lost` says so.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from laminar.config import ConfigError
from laminar.run.command_line import shell_command
from laminar.run.directory import LOCK_FILE, PROCESSES_DIR

MOVE_WAIT_S = 5.0
"""How long to wait for a process that moves the directory: that is one renaming."""
ASK_WAIT_S = 0.5
"""How long to wait for a process that asks whether another one lives: that is one reading."""
SOLE = ("coordinator", "serve")
"""Names of which a run has one process: its card is named by it."""
SOLE_WAIT_S = 2.0
"""How long to wait until a former process of that name, which was killed, is gone."""
_POLL_S = 0.02


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A live process of a run."""

    name: str  #: train, coordinator, node-0, store-0, ...
    host: str
    pid: int  #: in its own pid namespace
    pids: str  #: that namespace; numbers of another one mean other processes

    @property
    def local(self) -> bool:
        """Whether this process can send it a signal."""
        return (self.host, self.pids) == (socket.gethostname(), _pid_namespace())


class AlreadyServed(ConfigError):
    """The run has a process of this kind, and needs no other."""


class RunLock:
    """This process's share of a run directory; it ends with the process, however that ends."""

    def __init__(self, run_dir: Path, fd: int, name: str, *, inherited: bool = False) -> None:
        """Use `create`, `join` or `inherit`."""
        self.run_dir, self.fd = run_dir, fd
        self.inherited = inherited  #: another process of the run started this one
        self._identity = _get_identity(os.fstat(fd))
        self._card: tuple[Path, int] | None = None
        if reason := self.find_lost_reason():
            os.close(fd)
            raise ConfigError(reason)
        self._write_card(name)

    @classmethod
    def create(cls, run_dir: Path, name: str) -> RunLock:
        """The lock of a directory that was just made; ConfigError if another process has it
        already."""
        fd = _open(run_dir, os.O_CREAT | os.O_EXCL)
        _wait_for_share(fd, run_dir)
        return cls(run_dir, fd, name)

    @classmethod
    def join(cls, run_dir: Path, name: str) -> RunLock:
        """The lock of a run that there is; waits while the directory is being moved."""
        if not run_dir.is_dir():
            raise ConfigError(f"run directory {run_dir} does not exist")
        fd = _open(run_dir, os.O_CREAT)
        _wait_for_share(fd, run_dir)
        return cls(run_dir, fd, name)

    @classmethod
    def join_idle_run(cls, run_dir: Path, name: str) -> RunLock:
        """The lock of a run of which no process lives; ConfigError if one does, or begins just
        now."""
        fd = _open(run_dir, os.O_CREAT)
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
        """The lock by the descriptor that a process of the run handed down; without one, `join`."""
        if fd is None:
            return cls.join(run_dir, name)
        os.set_inheritable(fd, False)
        return cls(run_dir, fd, name, inherited=True)

    def find_lost_reason(self) -> str:
        """Why this directory is no longer the one that was locked; empty while it is."""
        path = self.run_dir / LOCK_FILE
        try:
            if _get_identity(os.stat(path)) == self._identity:
                return ""
        except (FileNotFoundError, NotADirectoryError):
            what = f"{path} was removed" if self.run_dir.is_dir() else f"{self.run_dir} is gone"
            return f"the run directory {what}: a run ends with it"
        except OSError:
            return ""  # a file system that does not answer says nothing about the directory
        return f"the run directory {self.run_dir} is another run's now: the former one ends"

    def close(self) -> None:
        """Give the share back, as far as this process has it."""
        os.close(self.fd)
        if self._card is not None:
            path, fd = self._card
            if (
                not self.find_lost_reason() and path.name not in SOLE
            ):  # one that waits for it has it open
                path.unlink(missing_ok=True)
            os.close(fd)

    def _write_card(self, name: str) -> None:
        """Say who we are, for those who ask; where that cannot be written we go on unnamed.
        ConfigError where another process has a name that only one may have."""
        holder = Holder(
            name=name, host=socket.gethostname(), pid=os.getpid(), pids=_pid_namespace()
        )
        sole = name in SOLE
        card = name if sole else f"{holder.host}.{holder.pid}"
        path = self.run_dir / PROCESSES_DIR / card
        try:
            path.parent.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
    """Within this, no process of a run lives in the directory and none can begin to.

    ConfigError if one does: it names them, and how to end them.
    """
    fd = _open(run_dir, os.O_CREAT)
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
    """The live processes of a run, on all its machines, by name."""
    try:
        cards = list((run_dir / PROCESSES_DIR).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [holder for path in cards if (holder := _read_live_holder(path)) is not None]
    return sorted(found, key=lambda holder: (holder.host, holder.name))


def in_use(run_dir: Path) -> str:
    """The sentence about a directory whose run lives."""
    living = holders(run_dir)
    who = format_holders(living) if living else f"whoever has {run_dir / LOCK_FILE} locked"
    return (
        f"run directory {run_dir} is in use by {who}; `{shell_command('stop', run_dir)}` ends a run"
    )


def _describe_sole_holder(run_dir: Path, card: Path) -> str:
    """The sentence about a name that another process has."""
    holder = _read_live_holder(card)
    who = format_holders([holder]) if holder else f"whoever has {card} locked"
    return f"{run_dir} is served already, by {who}; `{shell_command('stop', run_dir)}` ends the run"


def format_holders(living: list[Holder]) -> str:
    """ "coordinator (pid 7), node-0 (pid 8)", with the host of what is not here."""
    return ", ".join(
        f"{each.name} (pid {each.pid}{'' if each.local else f' on {each.host}'})" for each in living
    )


def _read_live_holder(card: Path) -> Holder | None:
    """The process that wrote the card, if it still has it locked."""
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


def _open(run_dir: Path, flags: int) -> int:
    path = run_dir / LOCK_FILE
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    except FileExistsError:
        raise ConfigError(in_use(run_dir)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}") from None


def _wait_for_share(fd: int, run_dir: Path) -> None:
    """Wait for our share; a process that has the whole has it for one renaming."""
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
    """Lock an open file without waiting; False: others have it in a way that forbids this.

    OSError of a file system that has no locks.
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
