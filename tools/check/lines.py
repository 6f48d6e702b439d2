"""Compare the size and the structure of the project with limits; exit 1 if one is exceeded.

Usage: python -m tools.check.lines
Reads  pyproject.toml ([tool.laminar.limits] and the layers of import-linter), the files and the
       commit subjects that git knows
Prints lines per folder, words of the documentation, import cycles, upward imports, functions above
       complexity 10, violations of docs/style.md (prose.py), and commit subjects that are too long
       or end with a full stop

A limit on lines or words rises only by what an issue grants; a limit on structure only falls.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.check import prose
from tools.check.imports import Imports

ROOT = Path(__file__).resolve().parents[2]
SUBJECT_MAX = 72


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    limits = project["laminar"]["limits"]
    sizes = count_lines(limits["lines"])
    layers = next(c["layers"] for c in project["importlinter"]["contracts"] if "layers" in c)
    imports = Imports(folders=("laminar", "tools"))
    found = {
        "words in docs/*.md": sum(len(p.read_text().split()) for p in ROOT.glob("docs/*.md")),
        "import cycles": len(imports.cycles()),
        "upward imports": len(upward_imports(imports, layers)),
        "functions above complexity 10": count_complex_functions(),
        "words in README.md": len((ROOT / "README.md").read_text().split()),
        "functions named by one word, in a thousand": per_mille(*prose.count_one_word_names()),
        "docstrings that begin badly, in a thousand": per_mille(*prose.count_bad_beginnings()),
        "banned phrases": len(prose.find_phrases()),
    }
    passed = [
        *[within(size, limits["lines"][folder], f"lines in {folder}/", sizes_below(folder))
          for folder, size in sizes.items()],
        *[within(count, limits[what], what) for what, count in found.items()],
        check_subjects(limits["subjects_since"]),
    ]  # fmt: skip
    return 0 if all(passed) else 1


def within(count: int, limit: int, what: str, parts: Counter[str] | None = None) -> bool:
    """Print a figure with its limit and parts; return whether it is within the limit."""
    over = f"  ABOVE by {count - limit:,}" if count > limit else ""
    print(f"{count:>7,} of {limit:>6,}  {what}{over}")
    for name, size in (parts or Counter()).most_common():
        print(f"{size:>24,}  {name}")
    return count <= limit


def per_mille(part: int, whole: int) -> int:
    """Return a share in thousandths, rounded up."""
    return -(-1000 * part // whole)


# --- lines --------------------------------------------------------------------------------------


def count_lines(folders: dict[str, int]) -> dict[str, int]:
    """Return the lines of Python per folder, excluding subfolders that have their own limit."""
    sizes = dict.fromkeys(folders, 0)
    for path, lines in code_files():
        owner = max((f for f in folders if path.startswith(f"{f}/")), key=len, default="")
        if owner:
            sizes[owner] += lines
    return sizes


def sizes_below(folder: str) -> Counter[str]:
    """Return the lines of each direct subfolder."""
    depth, sizes = folder.count("/") + 2, Counter[str]()
    for path, lines in code_files(folder):
        parts = path.split("/")
        if len(parts) > depth:
            sizes["/".join(parts[:depth])] += lines
    return sizes


def code_files(folder: str = ".") -> Iterator[tuple[str, int]]:
    """Yield the path and line count of every Python file that git tracks."""
    for path in git("ls-files", folder).splitlines():
        if path.endswith(".py") and (ROOT / path).is_file():
            yield path, len((ROOT / path).read_bytes().splitlines())


# --- structure ----------------------------------------------------------------------------------


def upward_imports(imports: Imports, layers: list[str]) -> list[tuple[str, str]]:
    """Return imports that point upwards: against the layers, or of the package's entry point."""
    ranks = {"laminar/__init__.py": -1}
    for rank, layer in enumerate(layers):
        for module in layer.split(" | "):
            ranks[module.replace(".", "/")] = rank

    def rank(path: str) -> int | None:
        return ranks.get(path, ranks.get("/".join(path.split("/")[:2])))

    ranked = [(user, used, rank(user), rank(used)) for user, used in imports.pairs()]
    return [(a, b) for a, b, of_a, of_b in ranked if None not in (of_a, of_b) and of_a > of_b]


def count_complex_functions() -> int:
    """Count the functions whose cyclomatic complexity is above 10."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901"]
    command += ["--config", "lint.mccabe.max-complexity=10", "--output-format", "concise"]
    run = subprocess.run([*command, "laminar", "tools"], cwd=ROOT, text=True, capture_output=True)
    if run.returncode > 1:
        raise SystemExit(f"ruff failed: {run.stderr}")
    return sum(": C901 " in line for line in run.stdout.splitlines())


# --- commits ------------------------------------------------------------------------------------


def check_subjects(base: str) -> bool:
    """Print the commit subjects since `base` that break the rule; return whether none does."""
    known = subprocess.run(["git", "merge-base", "--is-ancestor", base, "HEAD"], cwd=ROOT)
    if known.returncode:
        print(f"commit subjects: not checked, {base} is not in this history")
        return True
    bad = [
        subject
        for subject in git("log", "--no-merges", "--format=%s", f"{base}..HEAD").splitlines()
        if len(subject) > SUBJECT_MAX or subject.endswith(".")
    ]
    for subject in bad:
        print(f"commit subject above {SUBJECT_MAX} characters or with a full stop: {subject!r}")
    return not bad


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True)


if __name__ == "__main__":
    sys.exit(main())
