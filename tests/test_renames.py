"""What is renamed, is renamed by laminar/run/renames.py, and durable where it says so."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from laminar.run import renames

PACKAGE = Path(renames.__file__).parents[1]


def by_hand(source: str) -> list[int]:
    """Lines that rename a path: `path.rename(other)`, `path.replace(other)`.

    A text is replaced with two arguments, a field of a struct with a keyword.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            one = len(node.args) == 1 and not node.keywords
            if one and node.func.attr in ("rename", "replace"):
                found.append(node.lineno)
    return found


def test_nothing_is_renamed_by_hand() -> None:
    """Methods of paths are found here; functions of os and shutil, by ruff (TID251)."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "renames.py"]
    assert len(files) > 300
    found = {str(path): by_hand(path.read_text()) for path in files}
    assert not {path: lines for path, lines in found.items() if lines}


def test_a_renaming_by_hand_is_found() -> None:
    assert by_hand("a = 1\npath.replace(other)\nnew.rename(run / 'x')") == [2, 3]
    assert not by_hand("text.replace('a', 'b')\nstructs.replace(x, y=1)\nfiles.rename(a, b)")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the system, in order."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def record_replace(old: Path, new: Path) -> None:
        seen.append(f"rename {old.name} {new.name} {old.stat().st_size}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    return seen


def test_a_durable_file_is_synced_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, calls: list[str]
) -> None:
    renames.write_whole(tmp_path / "a", b"abc", durable=True)
    new = f".a.{os.getpid()}"
    assert calls == [f"sync {new}", f"rename {new} a 3", f"sync {tmp_path.name}"]
    renames.write_whole(tmp_path / "b", b"", durable=False)
    assert calls[3:] == [f"rename .b.{os.getpid()} b 0"]


def test_what_goes_to_another_directory_is_gone_from_its_own(
    tmp_path: Path, calls: list[str]
) -> None:
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    (tmp_path / "from" / "a").mkdir()
    renames.rename(tmp_path / "from" / "a", tmp_path / "to" / "a", durable=True)
    assert calls[1:] == ["sync to", "sync from"]


def test_where_writing_fails_the_old_content_stays_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames.write_whole(tmp_path / "a", b"old", durable=True)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        renames.write_whole(tmp_path / "a", b"new", durable=True)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]
