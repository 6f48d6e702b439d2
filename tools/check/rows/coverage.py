"""Row 7: the event table is complete, and every branch of the pure core is tested.

Reads   the list of pure modules in pyproject.toml; the tests of these modules
Gives   ROWS; as a program, the pytest options that keep these tests from running a second time

The tests run in two processes under coverage, whose data files are combined; the event table runs
in a third process without coverage. A branch that only an unrelated test reaches counts as not
covered.
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
CONTRACT = "Pure code cannot reach the world"  #: lists pure modules in pyproject.toml
FOLDERS = ("core", "eventlog", "events", "net")  #: packages whose pure modules are measured
#: Test of the event table; it tries so many situations that coverage would take minutes.
TABLE = "tests/core/test_event_table.py"
#: Tests that count towards coverage, divided between two processes.
TESTS = (
    ("tests/core", f"--ignore={TABLE}", "--ignore=tests/core/test_cost_at_size.py"),
    (
        "tests/events",
        "tests/eventlog",
        "tests/net/test_net_session.py",
        "tests/net/test_net_session_model.py",
        "tests/net/test_net_frames.py",
        "tests/net/test_net_rpc_peers.py",
        "tests/coordinator/test_tick_links.py",
    ),
)
TIMEOUT_S = 900  #: time limit of one test; coverage slows it down several times


class Summary(msgspec.Struct):
    """Counts of one file in coverage's JSON report."""

    num_statements: int
    covered_lines: int
    num_branches: int
    covered_branches: int


class File(msgspec.Struct):
    """Entry for a file in coverage's JSON report."""

    summary: Summary
    missing_lines: list[int] = []
    missing_branches: list[tuple[int, int]] = []


class Report(msgspec.Struct):
    files: dict[str, File]


class Part(NamedTuple):
    """Coverage of one module or folder."""

    percent: float  #: covered statements and branches
    missing: tuple[str, ...]  #: "file: lines ..., branches ..."


def parts() -> dict[str, list[str]]:
    """Return the files of each measured module or folder, by its name without `laminar.`."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (c["source_modules"] for c in linter["contracts"] if c["name"] == CONTRACT)
    modules = [module for module in pure if module.split(".")[1] in FOLDERS]
    return {module.removeprefix("laminar."): _files_of(module) for module in modules}


def _files_of(module: str) -> list[str]:
    """Return the file of a module, or all files of a folder."""
    path = ROOT / module.replace(".", "/")
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [str(file.relative_to(ROOT)) for file in found]


def table(gate: Gate) -> Figure:
    """Run the tests and return the figure of row 7, which is the same at both gates."""
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
    """Return every test file that this row runs."""
    paths = [path for tests in ((TABLE,), *TESTS) for path in tests]
    found = [*map(ROOT.joinpath, paths), *(f for p in paths for f in (ROOT / p).rglob("test_*.py"))]
    names = {str(file.relative_to(ROOT)) for file in found if file.is_file()}
    left_out = {f"--ignore={name}" for name in names - {TABLE}} & set(paths)
    return sorted(name for name in names if f"--ignore={name}" not in left_out)


def _start(data_file: Path | None, tests: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start the tests, under coverage if `data_file` is given."""
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
    """Wait for a process; return its output and exit code."""
    text, _ = process.communicate()
    return text, process.returncode


def _measure(folder: Path) -> dict[str, Part]:
    """Combine the data files and return the coverage of each part."""
    data, report = folder / ".coverage", folder / "report.json"
    for arguments in (("combine", "-q"), ("json", "-q", "-o", str(report))):
        text, code = _finish(_python("coverage", *arguments, data_file=data))
        if code:
            raise RuntimeError(f"coverage {arguments[0]}: {text}")
    files = msgspec.json.decode(report.read_bytes(), type=Report).files
    return {name: _part(paths, files) for name, paths in parts().items()}


def _part(names: list[str], files: dict[str, File]) -> Part:
    """Add up the files of one part; a file that no test imports counts as not covered."""
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
        promise="every event in every phase from every sender is handled, ignored or refused",
        pr="100 % of pairs; 100 % of branches of core, eventlog, session, codec",
        release="the same",
        run=table,
    ),
)

if __name__ == "__main__":
    print(*(f"--ignore={path}" for path in files()))
