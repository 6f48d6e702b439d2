"""Museum of silent failures: faults that others reported, planted in runs that must name them.

Usage: python -m tools.bench.museum [CASE ...] [--clean]
Prints two lines per case (cases.py): what was planted; after how many steps it was named, and how.
With --clean it makes runs without a fault instead, 200 versions in all, and prints their warnings.
Exits with 1 unless each case is named within STEPS_MAX steps of its fault or refused before the
next step; with --clean if a run warns or fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from laminar.events import events as ev
from laminar.names import exit_codes
from tools.bench.kills.lost_answers import read_log
from tools.bench.museum.cases import CASES, CLEAN, SMALL, Case
from tools.bench.museum.faults import FAULTS, write_hook
from tools.kit.real_run import ROOT, BadRun, Run, read_json

STEPS_MAX = 3
STOPPED_AT = 2  #: steps before a run is stopped and resumed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}")
    parser.add_argument("--clean", action="store_true", help="make runs without a fault")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(names):
        parser.error(f"unknown case {min(unknown)}: choose from {', '.join(names)}")
    with tempfile.TemporaryDirectory() as directory:
        if args.clean:
            return int(not run_clean(Path(directory)))
        chosen = [case for case in CASES if not args.cases or case.name in args.cases]
        named = [show_case(case, Path(directory) / case.name) for case in chosen]
    print(f"{sum(named)} of {len(named)} named")
    return int(not all(named))


def show_case(case: Case, directory: Path) -> bool:
    """Run a case and print its lines; return whether the fault was named in time."""
    said, since = run_case(case, directory)
    found = [s for s in said if s.step - since <= STEPS_MAX and case.named in (s.kind or s.text)]
    shown = (found or said or [ev.TrainingWarning(kind="", step=since, text="nothing")])[0]
    when = f"{shown.step - since} steps later, {shown.kind}" if shown.kind else "before a step"
    print(f"{'ok' if found else 'FAILED':7}{case.name} ({case.report}): {case.planted}")
    print(f"{'':7}{when}: {' '.join(shown.text.split())}", flush=True)
    return bool(found)


def run_case(case: Case, directory: Path) -> tuple[list[ev.TrainingWarning], int]:
    """Run a case until it is named or over; return what was said, and the step of the fault."""
    directory.mkdir(parents=True)
    settings = [*SMALL, *case.settings, *case.write_files(directory)]
    if case.name in FAULTS:
        write_hook(case.name, directory)
    path = {"PYTHONPATH": f"{directory}:{ROOT}"}
    run, since = Run(directory / "run", case.config, settings, path), 0
    try:
        if case.change is not None:
            run.until_step(STOPPED_AT)
            run.drain()
            run.end()
            since = read_json(run.run_dir / "summary.json")["steps"]
            run.resume(case.change(directory))
        return watch_run(run, since), since
    finally:
        run.close()


def watch_run(run: Run, since: int) -> list[ev.TrainingWarning]:
    """Wait for a warning, a refusal or too many steps; return all that was said."""

    def is_over() -> bool:
        warned = read_json(run.run_dir / "status.json").get("warnings")
        return bool(warned) or run.step() > since + STEPS_MAX + 1

    try:
        run.until(is_over, "it warned")
    except BadRun:
        if run.end() == exit_codes.USER_ERROR:
            return [ev.TrainingWarning(kind="", step=since, text=run.said().splitlines()[-1])]
    run.close()
    return read_warnings(run)


def read_warnings(run: Run) -> list[ev.TrainingWarning]:
    events = [told.event for told in read_log(run.run_dir).events]
    return [event for event in events if isinstance(event, ev.TrainingWarning)]


def run_clean(directory: Path) -> bool:
    """Make the runs without a fault; return whether none of them warned or failed."""
    versions = false_alarms = 0
    for number, (config, settings) in enumerate(CLEAN):
        run = Run(directory / f"clean-{number}", config, settings)
        code, said = run.end(), read_warnings(run)
        made = read_json(run.run_dir / "summary.json").get("weight_versions", 0)
        print(f"{config} {' '.join(settings)}: exit code {code}, {made} versions, {said}")
        versions, false_alarms = versions + made, false_alarms + len(said) + bool(code)
    print(f"{versions} versions, {false_alarms} false alarms")
    return not false_alarms


if __name__ == "__main__":
    sys.exit(main())
