"""Commands as they can be typed: hints name `laminar` as the shell of their reader finds it.

Reads   PATH, the working directory, where this Python lies
Gives   shell_command; own_program; with_extra, how an extra is installed
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
    """The command line that these words make, to be pasted in the working directory."""
    return " ".join([_find_program(), *(shlex.quote(str(word)) for word in words)])


def own_program() -> str:
    """This very `laminar`, from wherever it is called, for a shell."""
    own = Path(sys.executable).parent / NAME
    if own.is_file():
        return shlex.quote(str(own.absolute()))
    return f"{shlex.quote(sys.executable)} -m laminar.cli.main"


def with_extra(name: str) -> str:
    """How Laminar is installed with an extra: it is on no package index."""
    return f'pip install -e ".[{name}]" in the checkout, or pip install "laminar_rl-*.whl[{name}]"'


@cache
def _find_program() -> str:
    """`laminar` where that is this one; else its path, a relative one if it is below."""
    own = Path(sys.executable).parent / NAME
    found = shutil.which(NAME)
    if not own.is_file():
        return NAME if found else own_program()
    if found and os.path.samefile(found, own):
        return NAME
    relative = os.path.relpath(own)
    return shlex.quote(str(own) if relative.startswith(os.pardir) else relative)
