"""Packages for other machines: the wheel and the image train the model that they bring."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from laminar import __version__

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("laminar", "configs", "pyproject.toml", "README.md", "LICENSE")
NO_INDEX = ("Could not find a version", "No matching distribution", "Temporary failure")
SKIPPED = 77


def call(*words: object, limit_s: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, **options)


def test_every_file_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == __version__


@pytest.mark.long
@pytest.mark.process
def test_a_wheel_runs_the_quickstart(tmp_path: Path) -> None:
    """The other packages come from this environment, for pip would fetch gigabytes."""
    (tree := tmp_path / "tree").mkdir()
    call("cp", "-a", *BUILT_FROM, tree, cwd=ROOT)  # a build writes into its tree
    built = call(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, tree)
    if any(text in built.stderr for text in NO_INDEX):
        pytest.skip("setuptools, which builds a wheel, comes from a package index")
    assert not built.returncode, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python, laminar = (tmp_path / "venv" / "bin" / name for name in ("python", "laminar"))
    installed = call(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    assert not installed.returncode, installed.stderr
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    beside = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "beside.pth").write_text(beside)
    here = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}}
    found = call(python, "-P", "-c", "import laminar; print(laminar.__file__)", **here)
    assert Path(found.stdout.strip()).is_relative_to(site), found
    done = call(laminar, "quickstart", "--max-steps", 3, **here)
    assert not done.returncode and "the first step is done after" in done.stdout, done
    assert (tmp_path / "runs" / "quickstart" / "export" / "model.safetensors").is_file()
    checked = call(laminar, "audit", "runs/quickstart", **here)
    assert not checked.returncode, checked.stdout


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(3600)
def test_the_image_trains_in_a_clean_root(tmp_path: Path) -> None:
    """By the installer, which is all that the image files of tools/image call."""
    script = ROOT / "tools" / "image" / "try_install.sh"
    done = call(script, tmp_path / "root", limit_s=3600)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert not done.returncode, (done.stdout + done.stderr)[-6000:]
    assert f"laminar {__version__}" in done.stdout and "steps            10 in" in done.stdout
