"""How a command ends: the one sentence on stderr, and the exit code.

Reads   what ended the command
Writes  stderr
Gives   exit_code; terminal, around what a long command prints at its end

A mistake of the user, Ctrl-C, a reader that has seen enough (`| head`) and a file that cannot be
read or written are ordinary: none of them shows a traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from laminar import exit_codes
from laminar.config import ConfigError


def exit_code(program: str, command: Callable[[], int]) -> int:
    """Run the command; its exit code, or that of what ended it."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except ConfigError as error:
        say(program, str(error))
        return exit_codes.USER_ERROR
    except KeyboardInterrupt:
        say(program, "interrupted")
        return exit_codes.STOPPED_EARLY
    except BrokenPipeError:
        discard_stdout()
        return exit_codes.PIPE_CLOSED
    except OSError as error:
        if error.filename is None:
            raise
        say(program, f"{error.filename}: {error.strerror}")
        return exit_codes.USER_ERROR


def say(program: str, sentence: str) -> None:
    """On stderr, if anybody is there."""
    with contextlib.suppress(OSError):
        print(f"{program}: {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """A terminal that was closed meanwhile swallows what is printed; the exit code stays."""
    try:
        yield
    except OSError:
        discard_stdout()


def discard_stdout() -> None:
    """What is still in the buffer has no reader: the end of the process must not fail on it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
