"""docs/changing.md: its files exist and have the names next to them. Changes in few files."""

from __future__ import annotations

import re
import subprocess
import sys
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

#: Changes: the most files that each may touch, outside docs/; its patch; a program that uses it.
SOURCE = r"""
== failure-kind 1
@ laminar/core/state/failures.py
+    GPU_LOST = "gpu-lost", KindRecord("GPU lost", "replace it", "{subject} burns", 77)
     # fmt: on

from laminar.analysis.report.summary import _summarize_outcome
from laminar.core.state.failures import Failure, FailureKind
from tools.kit.bench import Bench
from tools.make.states import page
state = Bench().state
state.run.failed, state.run.phase = Failure(FailureKind.GPU_LOST, "rollout-0"), "ended"
found = _summarize_outcome(state)
assert (state.run.exit_code, found["exit_code"], found["failure"]) == (77, 77, "rollout-0 burns")
assert (found["failure_kind"], found["remedy"]) == ("gpu-lost", "replace it")
assert "| `gpu-lost`: GPU lost | 77 | no | replace it |" in page()
== key-that-decides 2
@ laminar/config/tree.py
     shuffle: Annotated[bool, doc("true: a new order in every epoch"), Decides()] = True
+    backwards: Annotated[bool, doc("true: the last first"), Decides(absent=False)] = False
@ laminar/core/scheduling/dispatch.py
     row = permute_rows(seed, pass_index, state.data.num_train)[position] if shuffle else position
+    row = state.data.num_train - 1 - row if state.settings.backwards else row

from laminar.config import load_config
from laminar.events.base import Settings
from laminar.events.codec import decode_event, encode
from laminar.events.commands import GenerateTrajectory
from tools.check.rows.golden import GOLDEN, disk_of, manifest, problem
from tools.kit.bench import Bench, only
from tools.kit.world_parts import coordinator_started
given = ["model.name=m", "data.dataset=gcd", "data.backwards=true"]
started = coordinator_started(Settings.from_config(load_config([], given), rules=()))
assert decode_event(encode(started)).settings.backwards
for backwards, first in ((False, 0), (True, 39)):
    bench = Bench(shuffle=False, backwards=backwards)
    bench.start()
    assert only(GenerateTrajectory, bench.commands)[0].row_index == first
for log in manifest():  # from before the key, with the digests that they have
    assert not problem(log, disk_of(GOLDEN / log.file))
== cli-command 2
@ laminar/cli/greet.py
+def add_parser(subparsers):
+    subparsers.add_parser("greet").set_defaults(function=run_greet)
+def run_greet(arguments):
+    print("Hello")
+    return 7
@ laminar/cli/commands.py
     "clean": "remove the shared memory of killed runs",
+    "greet": "say hello",

from tests.run.conftest import laminar
done = laminar("greet")
assert (done.returncode, done.stdout) == (7, "Hello\n"), done
assert "say hello" in laminar("--help").stdout
== metric 1
@ laminar/observe/metrics.py
             "rollout/queue": len(state.work.ready),
+            "rollout/replicas": len(state.members.replicas),
@ docs/metrics.md
 | `rollout/queue` | finished groups in no batch |
+| `rollout/replicas` | replicas of the run |

from laminar import open_run
from tests.analysis.test_metrics_document import documented
from tests.run.conftest import laminar
from tests.run.test_emulated_run import SMALL
print(laminar("train", *SMALL, "run.output_dir=runs", "run.name=run"))
metrics = open_run("runs/run").metrics
assert 5.0 in metrics["rollout/replicas"].to_pylist()
assert {key for key in metrics.column_names if "val-core/" not in key} <= documented()
== child-process 1
@ laminar/tasks/adder.py
+import sys
+from laminar.run.child_channel import Ready
+from laminar.run.child_process import Child, connect_user_code, spawn_child
+def start_adder():
+    return Child(spawn_child("laminar.tasks.adder", guarded=True), int)
+if __name__ == "__main__":
+    channel = connect_user_code(*sys.argv[1:])
+    channel.send(Ready())
+    channel.serve_requests(list[int], sum)

import asyncio
from laminar.tasks.adder import start_adder
async def add():
    child = start_adder()
    await child.await_ready(60.0)
    assert await child.channel.request_reply([1, 2, 3], 60.0) == 6
    await child.close()
    assert child.returncode == 0
asyncio.run(add())
"""
PARTS = re.compile(r"== (\S+) (\d)\n(.*?)\n\n(.*?)(?=\n== |\Z)", re.DOTALL)
EXAMPLES = {name: parts for name, *parts in PARTS.findall(SOURCE)}


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_change_in_few_files_works(name: str, tmp_path: Path) -> None:
    files, patch, program = EXAMPLES[name]
    (tmp_path / "table").write_text(f"== {name}\n{patch}")
    texts = patches.patched(patches.read(tmp_path / "table")[name])
    assert sum(not path.startswith("docs/") for path in texts) <= int(files)
    with patches.copy(texts, (*patches.PACKAGE, "docs", "tests")) as copy:
        use = [sys.executable, "-c", program]
        subprocess.run(use, cwd=copy, env=patches.environment(copy), check=True)
