"""A book of lines is whole after any death of the process that writes it."""

from __future__ import annotations

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
