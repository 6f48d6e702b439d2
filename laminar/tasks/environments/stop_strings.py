"""Stop strings of a turn: the end of its tokens, found in their text.

Gives   StopStrings; cut_text

The same for all engines, which know ids only: a replica looks at tokens as they arrive, drops those
behind the one that completes a stop string, and aborts the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 4  #: tokens before a stop string that are decoded, too: some decode differently at a start


class StopStrings:
    """The search for the stop strings of a turn."""

    def __init__(
        self, strings: Sequence[str], decode: Callable[[list[int]], str], done_ids: Sequence[int]
    ) -> None:
        """Begin after the turn's first tokens, `done_ids`; `decode` returns the text of ids."""
        self._strings, self._decode = strings, decode
        longest = max((len(each.encode()) for each in strings), default=0)
        self._window = longest + MARGIN  # a token is at least a byte
        self._ids = list(done_ids[-self._window :])
        self.is_found = bool(strings) and self._has_end()

    def find_end(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the next tokens belong to the turn; None: it has not ended."""
        for number, token in enumerate(tokens if self._strings else (), 1):
            self._ids = [*self._ids[1 - self._window :], token]
            if self._has_end():
                self.is_found = True
                return number
        return None

    def _has_end(self) -> bool:
        text = self._decode(self._ids)
        return any(each in text for each in self._strings)


def cut_text(text: str, strings: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string if there is one."""
    found = [(at, each) for each in strings if (at := text.find(each)) >= 0]
    at, string = min(found, default=(len(text), None))
    return text[:at], string
