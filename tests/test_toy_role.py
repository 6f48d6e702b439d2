"""A role is added in three files, and its processes join, report, are lost and come back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from laminar.run.directory import read_status
from tests.run.conftest import command
from tests.run.test_emulated_run import SMALL
from tools.check import patches

pytestmark = pytest.mark.process

CHANGES = """
== toy
@ laminar/names/roles.py
     ROLLOUT = "rollout"
+    TOY = "toy"
@ laminar/names/roles.py
         place=Place.SEVERAL, loss=Loss.ENDS_WITH_LAST,
     ),
+    Role.TOY: RoleRecord(
+        reports=("training-warning",), place=Place.EACH, loss=Loss.CONTINUES
+    ),
@ laminar/actors/system/roles.py
+def _make_toy(host: Host) -> ActorRole:
+    from laminar.actors.toy import Toy
+    return Toy(host)
 _ACTORS: dict[str, ActorParts] = {
+    Role.TOY: ActorParts(_make_toy, ("laminar.actors.toy",), ("laminar.actors.toy",)),
@ laminar/actors/toy.py
+from laminar.events import events as ev
+class Toy:
+    def __init__(self, host):
+        self.host = host
+    async def start(self):
+        text = f"{self.host.name} is number {self.host.incarnation}"
+        self.host.emit(ev.TrainingWarning(kind=self.host.name, step=0, text=text))
+    def handle_orders(self, orders): pass
+    async def stop(self): pass
"""


def test_a_role_is_an_entry_of_a_table(tmp_path: Path) -> None:
    """Its processes are on each machine; one is killed and replaced; they end with the run."""
    (tmp_path / "changes.txt").write_text(CHANGES)
    texts = patches.patched(patches.read(tmp_path / "changes.txt")["toy"])
    assert len(texts) <= 3
    run, warnings, listed = tmp_path / "run", dict[int, str](), ""
    place = f"run.output_dir={tmp_path}", "run.name=run", "run.nodes=2"
    with patches.copy(texts) as folder:
        environment = patches.environment(folder)

        def call(*words: str) -> str:
            return subprocess.check_output(command(*words), cwd=folder, env=environment, text=True)

        start = command("train", *SMALL, "trainer.total_training_steps=30", *place)
        with subprocess.Popen(start, cwd=folder, env=environment) as train:
            while train.poll() is None and len(warnings) < 2:
                time.sleep(0.1)
                status = read_status(run)
                pid = status.get("processes", {}).get("toy-1", 0)
                text = next((w for w in status.get("warnings", ()) if "toy-1" in w), "")
                if text and text not in warnings.values():
                    warnings[pid], listed = text, call("ps", str(run))
                    if len(warnings) == 1:
                        os.kill(pid, signal.SIGKILL)
        assert (train.returncode, len(warnings)) == (0, 2), warnings
        assert re.search(r"^toy-0 .*\ntoy-1 ", listed, re.MULTILINE), listed
        story = call("log", "story", str(run), "toy-1")
        assert "process-exited" in story and "-9" in story, story
        for check in (["audit"], ["log", "replay"], ["log", "trace"]):
            call(*check, str(run))
