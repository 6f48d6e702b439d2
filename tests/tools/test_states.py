"""docs/states.md is what the tables of states and moves give."""

from __future__ import annotations

from laminar.core.transitions import TABLES
from tools.states import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tools/states.py"


def test_the_page_has_every_status_and_move() -> None:
    text = page()
    for table in TABLES:
        for (status, trigger), target in table.moves.items():
            arrow = f"{status} --> {target}".replace("-e", "_e")
            lines = [line for line in text.splitlines() if arrow in line]
            assert any(trigger in line for line in lines), (table.of, status, trigger)
