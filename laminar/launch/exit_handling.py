"""End of a command: its one-sentence error on stderr, and its exit code.

Reads   the exception that ended the command
Writes  stderr
Gives   exit_code

A mistake of the user, Ctrl-C, a closed pipe (`| head`), a terminal that is not UTF-8 and a file
that cannot be read or written are ordinary: none of them shows a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable

from laminar.config import ConfigError
from laminar.names import exit_codes
from laminar.names.ports import find_transient

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Errors of printing to a full disk, a closed terminal or a closed descriptor."""


def exit_code(program: str, command: Callable[[], int], *, daemon: bool = False) -> int:
    """Run the command; return its exit code, or that of the exception that ended it.

    A `daemon` that a failing disk has ended is to be restarted.
    """
    escape_unencodable()
    try:
        code = command()
        if sys.stdout is not None:  # None if closed before the start (`>&-`)
            sys.stdout.flush()
        return code
    except ConfigError as error:
        print_error(program, str(error))
        failed = daemon and find_transient(error) is not None
        return exit_codes.LOG_UNWRITABLE if failed else exit_codes.USER_ERROR
    except KeyboardInterrupt:
        print_error(program, "interrupted")
        return exit_codes.STOPPED_EARLY
    except BrokenPipeError:
        discard_stdout()
        return exit_codes.PIPE_CLOSED
    except OSError as error:
        if error.filename is not None:
            print_error(program, f"{error.filename}: {error.strerror}")
            return exit_codes.USER_ERROR
        if error.errno not in OUTPUT_ERRORS:
            raise
        discard_stdout()
        print_error(program, f"the output cannot be written: {error.strerror}")
        return exit_codes.FAILED


def escape_unencodable() -> None:
    """Make the output print characters outside its encoding as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # text that is buffered already cannot be written
                stream.reconfigure(errors="backslashreplace")


def print_error(program: str, sentence: str) -> None:
    """Print a sentence on stderr, if that is open."""
    with contextlib.suppress(OSError):
        print(f"{program}: {sentence}", file=sys.stderr, flush=True)


def discard_stdout() -> None:
    """Discard buffered output without a reader, so that the end of the process does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
