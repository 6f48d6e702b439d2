"""docs/changing.md: its files exist and have the names next to them. Changes in one file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tools.check import patches

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "changing.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
CHANGES = {
    "Add an event", "Change a decision", "Add a setting", "Add a command", "Add a role",
    "Add an engine", "Add a batch strategy",
    "Add a reward signature", "Add a metric",
}  # fmt: skip

NEW_KIND = (
    '    GPU_LOST = "gpu-lost", KindRecord("GPU lost", "replace it", "{subject} burns", 77)\n'
)
FOLLOWS = """
from laminar.analysis.report.summary import Milestones, _summarize_outcome
from laminar.core.state.failures import Failure, FailureKind
from tools.kit.bench import Bench
from tools.make.states import page
state = Bench().state
state.run.failed, state.run.phase = Failure(FailureKind.GPU_LOST, "rollout-0"), "ended"
found = _summarize_outcome(state, Milestones())
assert (state.run.exit_code, found["exit_code"], found["failure"]) == (77, 77, "rollout-0 burns")
assert (found["failure_kind"], found["remedy"]) == ("gpu-lost", "replace it")
assert "| `gpu-lost`: GPU lost | 77 | no | replace it |" in page()
"""


def steps(section: str) -> list[str]:
    return [" ".join(step.split()) for step in re.split(r"^(?:\d+\.|$)", section, flags=re.M)]


def backquoted(step: str) -> tuple[list[str], list[str]]:
    """(files, names in the code)"""
    words = re.findall(r"`([^`]+)`", step)
    files = [word for word in words if re.fullmatch(r"[\w./-]+/[\w.-]+\.\w+", word)]
    return files, [word for word in words if re.fullmatch(r"[A-Za-z_][\w.]*", word)]


def test_every_change_has_a_section() -> None:
    assert set(SECTIONS) >= CHANGES


@pytest.mark.parametrize("section", SECTIONS)
def test_files_exist_and_have_the_names(section: str) -> None:
    named = 0
    for step in steps(SECTIONS[section]):
        files, names = backquoted(step)
        missing = [file for file in files if not (ROOT / file).is_file()]
        assert not missing, step
        text = "".join((ROOT / file).read_text() for file in files)
        for name in names if files else ():
            assert re.search(rf"\b{re.escape(name)}\b", text), (name, step)
        named += len(files)
    assert named >= 2, "a change has its files"


def test_a_kind_of_failure_is_added_in_one_file(tmp_path: Path) -> None:
    for folder in ("laminar", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    table = tmp_path / "laminar/core/state/failures.py"
    table.write_text(table.read_text().replace("    # fmt: on\n", f"{NEW_KIND}    # fmt: on\n"))
    subprocess.run([sys.executable, "-c", FOLLOWS], cwd=tmp_path, check=True)


KEY_THAT_DECIDES = """
== key_that_decides
@ laminar/config/tree.py
     shuffle: Annotated[bool, doc("true: a new order in every epoch"), Decides()] = True
+    backwards: Annotated[bool, doc("true: the last first"), Decides(absent=False)] = False
@ laminar/core/scheduling/dispatch.py
     row = permute_rows(seed, pass_index, state.data.num_train)[position] if shuffle else position
+    row = state.data.num_train - 1 - row if state.settings.backwards else row
"""
ITS_STORY = """
from laminar.config import load_config
from laminar.events.base import Settings
from laminar.events.codec import decode_event, encode
from laminar.events.commands import GenerateTrajectory
from tools.kit.bench import Bench, only
from tools.kit.world_parts import coordinator_started

given = ["model.name=m", "data.dataset=gcd", "data.backwards=true"]
started = coordinator_started(Settings.from_config(load_config([], given), rules=()))
assert decode_event(encode(started)).settings.backwards
for backwards, first in ((False, 0), (True, 39)):
    bench = Bench(shuffle=False, backwards=backwards)
    bench.start()
    assert only(GenerateTrajectory, bench.commands)[0].row_index == first
"""


def test_key_that_decides_touches_two_files_with_its_use(tmp_path: Path) -> None:
    """Logs from before it replay, with the digests that they have."""
    (tmp_path / "table").write_text(KEY_THAT_DECIDES)
    texts = patches.patched(patches.read(tmp_path / "table")["key_that_decides"])
    assert len(texts) <= 2
    with patches.copy(texts, (*patches.PACKAGE, "tests/golden")) as copy:
        run = partial(subprocess.run, cwd=copy, env=patches.environment(copy), check=True)
        run([sys.executable, "-c", ITS_STORY])
        golden = run([sys.executable, "-m", "tools.make.golden"], capture_output=True, text=True)
    assert "nothing is changed" in golden.stdout
