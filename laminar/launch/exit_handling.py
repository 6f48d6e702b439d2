"""How a command ends: the one sentence on stderr, and the exit code.

Reads   what ended the command
Writes  stderr
Gives   exit_code

A mistake of the user, Ctrl-C, a reader that has seen enough (`| head`) and a file that cannot be
read or written are ordinary: none of them shows a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable

from laminar.config import ConfigError
from laminar.names import exit_codes

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""What printing meets on a full disk, a terminal that was closed, a closed descriptor."""


def exit_code(program: str, command: Callable[[], int]) -> int:
    """Run the command; its exit code, or that of what ended it."""
    try:
        code = command()
        if sys.stdout is not None:  # it was closed before we began (`>&-`)
            sys.stdout.flush()
        return code
    except ConfigError as error:
        print_error(program, str(error))
        return exit_codes.USER_ERROR
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


def print_error(program: str, sentence: str) -> None:
    """Print a sentence on stderr, if there is one."""
    with contextlib.suppress(OSError):
        print(f"{program}: {sentence}", file=sys.stderr, flush=True)


def discard_stdout() -> None:
    """What is still in the buffer has no reader: the end of the process must not fail on it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
