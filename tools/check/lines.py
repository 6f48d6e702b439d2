"""Lines of each folder beside its budget.

Usage: python -m tools.check.lines
Reads  pyproject.toml ([tool.laminar.lines]), the files that git knows
Prints a table: the parts of the package, and each budget with what is used of it. It fails never:
a budget is a reason to ask what an issue adds, not to cut a line.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTED = (".py", ".txt")  #: tools/check/rows/planted.txt is a table of changes of code


def main() -> None:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["laminar"]["lines"]
    listed = subprocess.check_output(["git", "ls-files", *budgets], cwd=ROOT, text=True)
    lines = Counter[str]()
    for name in listed.splitlines():
        if name.endswith(COUNTED) and (ROOT / name).is_file():
            count = len((ROOT / name).read_bytes().splitlines())
            folders = Path(name).parts[:-1]
            lines[folders[0]] += count
            if len(folders) > 1:
                lines["/".join(folders[:2])] += count
    for folder, budget in budgets.items():
        over = lines[folder] - budget
        mark = f"  {over:,} OVER" if over > 0 else ""
        print(f"{lines[folder]:>7,} of {budget:>6,}  {folder}{mark}")
        parts = [name for name in lines if name.startswith(f"{folder}/")]
        for name in sorted(parts, key=lambda part: -lines[part]):
            print(f"{lines[name]:>17,}  {name}")


if __name__ == "__main__":
    main()
