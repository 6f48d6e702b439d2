"""Trial import of a user's file in a separate process: python -m laminar.tasks.import_check.

Reads   the user's Python file, which may hang, end its process or crash it
Raises  ConfigError when its import does not finish

An import that raises has finished too: the next import reports the exception.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from laminar.config import ConfigError
from laminar.names.process_end import describe_exit
from laminar.run.isolated_process import run_isolated
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S, load_quietly

ENDED = b"ended"
"""The child's report that the import has finished; an exit code could be the file's own."""


def check_import(path: str, key: str, limit_s: float = IMPORT_TIMEOUT_S) -> None:
    """Import the file that the setting `key` names, if it exists, within `limit_s` seconds."""
    if not Path(path).is_file():
        return
    try:
        said, code = run_isolated("laminar.tasks.import_check", [path], b"", limit_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{key} = {path!r} was not imported within {limit_s:g} s; move slow or blocking code "
            "into the function"
        ) from None
    if said != ENDED:
        raise ConfigError(
            f"{key} = {path!r} ends the process that imports it "
            f"({describe_exit(code)}); a file of functions must not end its process"
        )


def main(path: str) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # keep the file's output apart from the report
    with suppress(ConfigError):
        load_quietly(path, "")
    os.write(out, ENDED)
    os._exit(0)  # do not wait for threads of the file


if __name__ == "__main__":
    main(sys.argv[1])
