"""The secret of a run: who can read it is let in by the run's processes, and nobody else is.

Reads   RUN/secret
Writes  RUN/secret: 32 random bytes that only its owner can read
Gives   make_secret, make_missing_secret; read_secret, which raises ConfigError; Secret, from which
        all keys are derived

Whatever makes a run directory makes the secret; the user does nothing. A key is derived for each
use, so that none of them tells anything of another. The secret says which run a process is of, not
which role it has: all processes of a run have one owner, who can read everything of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

from laminar.config import ConfigError
from laminar.run.command_line import shell_command
from laminar.run.directory import SECRET_FILE
from laminar.run.renames import sync

SECRET_BYTES = 32


class Secret:
    """The bytes of one run's secret. Neither they nor a key is shown when it is printed."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __repr__(self) -> str:
        return "Secret(***)"

    def derive_key(self, use: str) -> bytes:
        """32 bytes for one use, whose name has at most 16 characters."""
        return hashlib.blake2b(self._content, digest_size=32, person=use.encode()).digest()

    @property
    def run_id(self) -> str:
        """The run's identity on every machine, wherever its directory is mounted; no secret."""
        return self.derive_key("run")[:8].hex()


def make_secret(run_dir: Path) -> None:
    """Give a run directory its secret; FileExistsError if it has one, OSError of the disk."""
    path = run_dir / SECRET_FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # whatever the umask took away
        file.write(secrets.token_bytes(SECRET_BYTES))
    sync(path)
    sync(run_dir)


def make_missing_secret(run_dir: Path) -> None:
    """Give a run that goes on a secret where it has none; OSError of the disk."""
    with contextlib.suppress(FileExistsError):
        make_secret(run_dir)


def read_secret(run_dir: Path) -> Secret:
    """The secret of a run; ConfigError if there is none, or if others could have read it."""
    path = run_dir / SECRET_FILE
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing, and the processes of a run recognise each other by it: put it "
            f"back, or let `{shell_command('train', '--resume', run_dir)}` make another"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): a run's processes belong to the user who "
            "made its directory"
        ) from None
    with os.fdopen(fd, "rb") as file:
        _check_permissions(path, os.fstat(fd))
        return Secret(file.read())


def _check_permissions(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no file: remove it, and resume the run to make another")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, and this process to user {os.geteuid()}: "
            "start all processes of a run as the user who made its directory"
        )
    if mode & 0o077:
        raise ConfigError(
            f"{path} is open to other users (mode {mode:04o}), who may join the run with it: end "
            "the run, remove the file, and resume the run to make another; on a file system "
            "without file modes choose another run.output_dir"
        )
    if found.st_size != SECRET_BYTES:
        raise ConfigError(
            f"{path} has {found.st_size} bytes and not {SECRET_BYTES}: remove it, and resume the "
            "run to make another"
        )
