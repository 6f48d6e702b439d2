"""The pictures of the documents: what is committed is what the sources give."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from tools.pictures import FOLDER, Arrow, Box, Picture, read, svg

SOURCES = sorted(FOLDER.glob("*.toml"))
PICTURE = Picture(
    title="two",
    box={"a": Box((0, 0), (10, 4), "a < b\nsecond"), "b": Box((20, 2), (8, 4), "b", "state")},
    arrow=(Arrow(("a.right@0.25", (15, 1), "b.top"), "over", "data"),),
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_committed_picture_is_what_its_source_gives(source: Path) -> None:
    committed = source.with_suffix(".svg").read_text()
    assert committed == svg(read(source)), "run python tools/pictures.py"


def test_every_picture_has_a_source_and_is_shown() -> None:
    names = {path.stem for path in SOURCES}
    assert {path.stem for path in FOLDER.glob("*.svg")} == names
    text = "".join(page.read_text() for page in FOLDER.parent.glob("*.md"))
    assert [name for name in names if f"(pictures/{name}.svg)" not in text] == []


def test_boxes_and_arrows_are_where_the_source_says() -> None:
    root = ElementTree.fromstring(svg(PICTURE))
    names = {"s": "http://www.w3.org/2000/svg"}
    assert [t.text for t in root.findall("s:text", names)] == ["a < b", "second", "b", "over"]
    (arrow,) = root.findall("s:polyline", names)
    assert arrow.attrib["points"] == "100,10 150,10 240,20"
    assert root.find("s:title", names).text == "two"  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["c.right", "a.middle", "a"])
def test_an_arrow_to_nowhere_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="no such side"):
        svg(msgspec.structs.replace(PICTURE, arrow=(Arrow((place, "b.top")),)))


def test_text_that_does_not_fit_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        svg(
            msgspec.structs.replace(
                PICTURE, box=PICTURE.box | {"a": Box((0, 0), (4, 4), "too long")}
            )
        )
