"""The secret of a run: only processes that can read it may connect to the run's processes.

Reads   RUN/secret
Writes  RUN/secret: 32 random bytes that only its owner can read
Gives   make_secret, make_missing_secret; read_secret, which raises ConfigError; Secret, from which
        all keys are derived

The command that makes a run directory also makes the secret; the user does nothing. Each use has a
separate derived key, so that no key reveals another. The secret proves which run a process belongs
to, not its role: all processes of a run have one owner, who can read everything in it.
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
    """The bytes of one run's secret; hidden, as are its keys, when printed."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __repr__(self) -> str:
        return "Secret(***)"

    def derive_key(self, use: str) -> bytes:
        """Derive 32 bytes for one use, whose name has at most 16 characters."""
        return hashlib.blake2b(self._content, digest_size=32, person=use.encode()).digest()

    @property
    def run_id(self) -> str:
        """The run's public identity, the same wherever its directory is mounted."""
        return self.derive_key("run")[:8].hex()


def make_secret(run_dir: Path) -> None:
    """Give a run directory its secret; FileExistsError if it has one, OSError of the disk."""
    path = run_dir / SECRET_FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # independent of the umask
        file.write(secrets.token_bytes(SECRET_BYTES))
    sync(path)
    sync(run_dir)


def make_missing_secret(run_dir: Path) -> None:
    """Give a resumed run a secret if it has none; OSError of the disk."""
    with contextlib.suppress(FileExistsError):
        make_secret(run_dir)


def read_secret(run_dir: Path) -> Secret:
    """Read the secret of a run; ConfigError if it is missing or others could have read it."""
    path = run_dir / SECRET_FILE
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing, and the processes of a run authenticate each other with it: "
            f"restore it, or let `{shell_command('train', '--resume', run_dir)}` create another"
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
        raise ConfigError(f"{path} is not a file: remove it, and resume the run to create another")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, and this process to user {os.geteuid()}: "
            "start all processes of a run as the user who made its directory"
        )
    if mode & 0o077:
        raise ConfigError(
            f"{path} is open to other users (mode {mode:04o}), who may join the run with it: end "
            "the run, remove the file, and resume the run to create another; on a file system "
            "without file modes choose another run.output_dir"
        )
    if found.st_size != SECRET_BYTES:
        raise ConfigError(
            f"{path} has {found.st_size} bytes instead of {SECRET_BYTES}: remove it, and resume "
            "the run to create another"
        )
