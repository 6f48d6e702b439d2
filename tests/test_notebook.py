"""docs/quickstart.ipynb as it is stored; `make test-notebook` executes it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import laminar

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
BYTES_MAX = 100_000
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def sources() -> list[str]:
    """The Python of each cell, without the lines for the shell."""
    code = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    return [re.sub(r"^!.*$", "", text, flags=re.MULTILINE) for text in code]


def test_its_python_parses_and_names_what_there_is() -> None:
    nodes = [node for text in sources() for node in ast.walk(ast.parse(text))]
    names = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "laminar"
    }
    assert names == {"start", "open_run"} and names <= set(dir(laminar))


def test_its_outputs_are_there_small_and_of_no_machine() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < BYTES_MAX
    assert sum("image/png" in str(cell.get("outputs")) for cell in CELLS) == 2
    assert not re.search(r"/(home|root|work|tmp)/|Traceback|Warning", text)
