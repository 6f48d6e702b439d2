"""The terminal of `laminar train` and `laminar serve`: printing to it never ends a run.

Reads   nothing
Writes  standard output; one sentence on stderr when the output is no longer read

A run continues without a reader (`| head`), as it does without a terminal (`nohup`), so its outcome
never depends on how much of its output is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from rich.console import Console

from laminar.launch.exit_handling import discard_stdout, escape_unencodable, print_error


class Terminal(Console):
    """Console of rich that detects when its reader has gone."""

    def __init__(self, *, quiet: bool = False, plain: bool = False) -> None:
        """Initialize; `quiet`: print nothing, `plain`: print lines only, even on a terminal.

        In a notebook, lines are printed as text, not HTML.
        """
        escape_unencodable()
        terminal = False if plain else None
        super().__init__(soft_wrap=True, quiet=quiet, force_jupyter=False, force_terminal=terminal)
        self.gone = False
        self._last_word = ""

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print the lines as they are; output that fails now may be written with later output."""
        for line in lines:
            with contextlib.suppress(OSError):
                self.print(line, highlight=False, markup=False)

    def flush_output(self) -> None:
        """Flush at the end of the output; drop what still cannot be written."""
        try:
            self.file.flush()
        except OSError:
            discard_stdout()

    def when_gone(self, sentence: str) -> None:
        """Print the sentence on stderr once the reader is gone, or now if it is gone already."""
        self._last_word = sentence
        if self.gone:
            print_error("laminar", sentence)

    def on_broken_pipe(self) -> None:
        """Silence the console; overrides rich's default, which exits the program."""
        if self.gone:
            return
        self.gone = self.quiet = True
        discard_stdout()
        if self._last_word:
            print_error("laminar", self._last_word)
