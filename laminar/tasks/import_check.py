"""Trial import of a user's file in a separate process, started by run/child_process.py.

Reads   the user's Python file, which may hang, end its process or crash it
Raises  ConfigError when its import does not finish

An import that raises has finished too: the next import reports the exception.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from laminar.config import ConfigError
from laminar.run.child_channel import Ready
from laminar.run.child_process import call_isolated, connect_user_code
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S, load_quietly


def check_import(path: str, key: str, limit_s: float = IMPORT_TIMEOUT_S) -> None:
    """Import the file that the setting `key` names, if it exists, within `limit_s` seconds."""
    if not Path(path).is_file():
        return
    call_isolated(
        "laminar.tasks.import_check",
        [path],
        limit_s,
        late=f"{key} = {path!r} was not imported within {limit_s:g} s; move slow or blocking code "
        "into the function",
        ended=f"{key} = {path!r} ends the process that imports it",
        advice="a file of functions must not end its process",
    )


def main(fd: str, parent: str, path: str) -> None:
    channel = connect_user_code(fd, parent)
    with suppress(ConfigError):
        load_quietly(path, "")
    channel.send_last(Ready())


if __name__ == "__main__":
    main(*sys.argv[1:])
