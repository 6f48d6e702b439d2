"""A book of lines is whole after any death of the process that writes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from laminar.storage.durable_lines import DurableLines


@pytest.mark.parametrize("torn", ["", "{", '{"step": 3}'])
async def test_a_torn_last_line_is_mended_before_the_next(torn: str, tmp_path: Path) -> None:
    """It was reported to nobody: what is behind the last end of a line goes."""
    path = tmp_path / "book.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    book = DurableLines(path)
    await book.enter(b'{"step": 4}')
    await book.enter(b'{"step": 5}')
    book.close()
    assert path.read_text().splitlines() == [f'{{"step": {n}}}' for n in (1, 2, 4, 5)]


@pytest.mark.parametrize("call", ["write", "fdatasync", "ftruncate", "open"])
async def test_a_line_that_failed_for_a_file_server_is_written_once(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync, too, is followed by a write: another sync alone would prove nothing."""
    path = tmp_path / "book.jsonl"

    def fail(*arguments: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    book = DurableLines(path)
    await book.enter(b"1")
    for name in (call, "fdatasync"):
        monkeypatch.setattr(os, name, fail)
    for _ in range(2):
        with pytest.raises(OSError, match="Stale"):
            await book.enter(b"2")
    monkeypatch.undo()
    await book.enter(b"2")
    book.close()
    assert path.read_text().splitlines() == ["1", "2"]
