"""Row 7: the table of events is complete, and no branch of the pure core is untested.

Reads   the list of pure modules in pyproject.toml; the tests that are about these modules and no
        others
Gives   ROWS; as a program, what keeps pytest from running these tests once more

The tests run in two processes under coverage, whose data files are combined, the table of events
beside them without; a branch that only some other test reaches by accident counts as not covered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from tools.check.rows.base import Figure, Gate, Row
from tools.kit.event_cells import CELLS, STATUS_CELLS

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = "Pure code cannot reach the world"  #: in pyproject.toml: the list of pure modules
FOLDERS = ("core", "eventlog", "events", "net")  #: whose pure modules are measured
#: The table of events is tried in so many situations that it would take minutes under coverage.
TABLE = "tests/core/test_event_table.py"
#: The tests that cover, and no others; two processes share them.
TESTS = (
    (
        "tests/core",
        f"--ignore={TABLE}",
        "--ignore=tests/core/test_cost_at_size.py",
    ),
    (
        "tests/events",
        "tests/eventlog",
        "tests/net/test_net_session.py",
        "tests/net/test_net_session_model.py",
        "tests/net/test_net_frames.py",
    ),
)
TIMEOUT_S = 900
"""Of one test: under coverage it takes several times as long."""


class Summary(msgspec.Struct):
    """Counts of one file, as coverage writes them."""

    num_statements: int
    covered_lines: int
    num_branches: int
    covered_branches: int


class File(msgspec.Struct):
    """One file of coverage's report."""

    summary: Summary
    missing_lines: list[int] = []
    missing_branches: list[tuple[int, int]] = []


class Report(msgspec.Struct):
    files: dict[str, File]


class Part(NamedTuple):
    """How much of one part the tests executed."""

    percent: float  #: of statements and branches
    missing: tuple[str, ...]  #: "file: lines ..., branches ..."


def parts() -> dict[str, list[str]]:
    """What is measured: the files of each pure module or folder, by its name without `laminar`."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (c["source_modules"] for c in linter["contracts"] if c["name"] == CONTRACT)
    modules = [module for module in pure if module.split(".")[1] in FOLDERS]
    return {module.removeprefix("laminar."): _files_of(module) for module in modules}


def _files_of(module: str) -> list[str]:
    """A module's one file, or all files of a folder."""
    path = ROOT / module.replace(".", "/")
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [str(file.relative_to(ROOT)) for file in found]


def table(gate: Gate) -> Figure:
    """The same at both gates: it is complete or it is not."""
    with TemporaryDirectory() as folder:
        tests = [_start(Path(folder) / f".coverage.{i}", paths) for i, paths in enumerate(TESTS)]
        tests.append(_start(None, (TABLE,)))
        printed = [_finish(test) for test in tests]
        failed = [text for text, code in printed if code]
        if failed:
            return Figure("the tests fail", False, "\n".join(failed))
        print(*(text for text, _ in printed), sep="\n", file=sys.stderr)
        measured = _measure(Path(folder))
    figures = ", ".join(f"{name} {part.percent:.1f} %" for name, part in measured.items())
    missing = [line for part in measured.values() for line in part.missing]
    cells = len(CELLS) + len(STATUS_CELLS)
    return Figure(
        f"{cells} of {cells} pairs have a verdict; lines and branches: {figures}",
        not missing,
        "\n".join(missing),
    )


def files() -> list[str]:
    """Every file of tests that runs."""
    paths = [path for tests in ((TABLE,), *TESTS) for path in tests]
    found = [*map(ROOT.joinpath, paths), *(f for p in paths for f in (ROOT / p).rglob("test_*.py"))]
    names = {str(file.relative_to(ROOT)) for file in found if file.is_file()}
    left_out = {f"--ignore={name}" for name in names - {TABLE}} & set(paths)
    return sorted(name for name in names if f"--ignore={name}" not in left_out)


def _start(data_file: Path | None, tests: tuple[str, ...]) -> subprocess.Popen[str]:
    """Under coverage, or, without a file for what it finds, as they are."""
    sources = [path for paths in parts().values() for path in paths]
    traced = ["coverage", "run", "--branch", f"--include={','.join(sources)}", "-m"]
    pytest = ["pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", *tests]
    return _python(*(traced if data_file else []), *pytest, data_file=data_file)


def _python(*arguments: str, data_file: Path | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"COVERAGE_FILE": str(data_file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, int]:
    """(what it printed, its exit code)"""
    text, _ = process.communicate()
    return text, process.returncode


def _measure(folder: Path) -> dict[str, Part]:
    """Both data files together, file by file."""
    data, report = folder / ".coverage", folder / "report.json"
    for arguments in (("combine", "-q"), ("json", "-q", "-o", str(report))):
        text, code = _finish(_python("coverage", *arguments, data_file=data))
        if code:
            raise RuntimeError(f"coverage {arguments[0]}: {text}")
    files = msgspec.json.decode(report.read_bytes(), type=Report).files
    return {name: _part(paths, files) for name, paths in parts().items()}


def _part(names: list[str], files: dict[str, File]) -> Part:
    """The files of one part; what no test imports counts as not covered."""
    all_, covered, missing = 0, 0, []
    for name in names:
        if name not in files:
            missing.append(f"{name}: no test imports it")
            continue
        summary = files[name].summary
        all_ += summary.num_statements + summary.num_branches
        covered += summary.covered_lines + summary.covered_branches
        if files[name].missing_lines or files[name].missing_branches:
            branches = [f"{a}->{b}" for a, b in files[name].missing_branches]
            missing.append(f"{name}: lines {files[name].missing_lines}, branches {branches}")
    return Part(100 * covered / max(all_, 1), tuple(missing))


ROWS = (
    Row(
        number=7,
        promise="Every event in every phase from every sender is handled, ignored or refused",
        pr="100 % of pairs; 100 % of branches of core, eventlog, session, codec",
        release="the same",
        run=table,
    ),
)

if __name__ == "__main__":
    print(*(f"--ignore={path}" for path in files()))
