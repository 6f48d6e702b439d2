"""Every planted bug still fits the text of the product; whether it is found is row 5's business."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.check import patches
from tools.check.rows.planted import QUICK, TABLE

BUGS = patches.read(TABLE)
LINES_MAX = 6


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_fits_the_text(name: str) -> None:
    for path, text in patches.patched(BUGS[name]).items():
        assert text != (patches.ROOT / path).read_text()
        compile(text, path, "exec")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_small(name: str) -> None:
    for change in BUGS[name].changes:
        kept = set(change.old.splitlines())
        assert len([line for line in change.new.splitlines() if line not in kept]) <= LINES_MAX


def test_the_bugs_of_a_change_are_in_the_table() -> None:
    assert set(QUICK) <= set(BUGS)


@pytest.mark.parametrize(
    ("text", "times"), [("b = 1\n", 0), ("a = 1\nc = 1\na = 1\n", 2)], ids=["gone", "twice"]
)
def test_a_bug_whose_text_is_gone_is_named(text: str, times: int, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    patch = patches.Patch("forgets", (), (patches.Change("module.py", "a = 1\n", "a = 2\n"),))
    with pytest.raises(patches.PatchError, match=f"forgets: this occurs in module.py {times}"):
        patches.patched(patch, tmp_path)


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    table.write_text("For people.\n\n== one trainer-dies\n@ a.py\n x\n-y\n+z\n# a part\n\n== two\n")
    one, two = patches.read(table).values()
    assert one == ("one", ("trainer-dies",), (patches.Change("a.py", "x\ny\n", "x\nz\n"),))
    assert two == ("two", (), ())
    (tmp_path / "table.txt").write_text("== one\n== one\n")
    with pytest.raises(patches.PatchError, match="twice"):
        patches.read(table)


def test_what_python_finds_in_a_copy_is_the_changed_text() -> None:
    with patches.copy({"laminar/names/__init__.py": "PLANTED = 7\n"}) as folder:
        program = "import laminar.names as n, tools.check.patches; print(n.PLANTED, n.__file__)"
        said = subprocess.check_output(
            [sys.executable, "-c", program], cwd=folder, env=patches.environment(folder), text=True
        )
    assert said.split() == ["7", str(folder / "laminar" / "names" / "__init__.py")]
