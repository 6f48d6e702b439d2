"""Pages and pictures that tools make: what is committed is what their sources give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.make.pictures import FOLDER, read, svg
from tools.make.states import PAGE, page


def test_the_page_of_states_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.make.states"


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_a_committed_picture_is_what_its_source_gives(source: Path) -> None:
    committed = source.with_suffix(".svg").read_text()
    assert committed == svg(read(source)), "run python tools/make/pictures.py"
