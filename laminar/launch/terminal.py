"""The terminal of `laminar train` and `laminar serve`: what is printed there ends nothing.

Reads   nothing
Writes  standard output; one sentence on stderr when the output is no longer read

A run goes on without a reader (`| head`), as it does without a terminal (`nohup`), so that what
becomes of it never depends on how much of its output is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from rich.console import Console

from laminar.launch.exit_handling import discard_stdout, print_error


class Terminal(Console):
    """rich's console, which knows when its reader has gone."""

    def __init__(self, *, quiet: bool = False, plain: bool = False) -> None:
        """`quiet`: nothing is printed. `plain`: lines only, also on a terminal. In a notebook,
        lines are lines and no HTML."""
        terminal = False if plain else None
        super().__init__(soft_wrap=True, quiet=quiet, force_jupyter=False, force_terminal=terminal)
        self.gone = False
        self._last_word = ""

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print as they are; what cannot be written now may be written with what comes later."""
        for line in lines:
            with contextlib.suppress(OSError):
                self.print(line, highlight=False, markup=False)

    def flush_output(self) -> None:
        """Nothing more comes: what still cannot be written is dropped."""
        try:
            self.file.flush()
        except OSError:
            discard_stdout()

    def when_gone(self, sentence: str) -> None:
        """Say so on stderr once there is no reader, or now, if there is none already."""
        self._last_word = sentence
        if self.gone:
            print_error("laminar", sentence)

    def on_broken_pipe(self) -> None:
        """Called by rich, whose own way is to leave the program."""
        if self.gone:
            return
        self.gone = self.quiet = True
        discard_stdout()
        if self._last_word:
            print_error("laminar", self._last_word)
