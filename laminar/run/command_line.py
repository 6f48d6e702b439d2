"""Commands for the user to copy, with `laminar` spelled so that the user's shell finds it.

Reads   PATH, the working directory, the location of this Python
Gives   shell_command; own_program; with_extra, how to install an extra
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

NAME = "laminar"


def shell_command(*words: object) -> str:
    """Return a command line that can be pasted in the working directory."""
    return " ".join([_find_program(), *(shlex.quote(str(word)) for word in words)])


def own_program() -> str:
    """Return the path of the running `laminar`, quoted for a shell, independent of PATH."""
    own = Path(sys.executable).parent / NAME
    if own.is_file():
        return shlex.quote(str(own.absolute()))
    return f"{shlex.quote(sys.executable)} -m laminar.cli.main"


def with_extra(name: str) -> str:
    """Return how to install Laminar with an extra (Laminar is not on a package index)."""
    return f'pip install -e ".[{name}]" in the checkout, or pip install "laminar_rl-*.whl[{name}]"'


@cache
def _find_program() -> str:
    """Return `laminar` if PATH finds this one, else its path (relative if it is below)."""
    own = Path(sys.executable).parent / NAME
    found = shutil.which(NAME)
    if not own.is_file():
        return NAME if found else own_program()
    if found and os.path.samefile(found, own):
        return NAME
    relative = os.path.relpath(own)
    return shlex.quote(str(own) if relative.startswith(os.pardir) else relative)
