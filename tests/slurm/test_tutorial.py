"""The half of docs/tutorial.md that is on a cluster, word for word."""

from __future__ import annotations

import pytest

from tests.run.test_tutorial import CLUSTER, ROWS, run_script, sections
from tests.slurm.conftest import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.process]


def test_every_command_on_the_cluster_works(lab: Lab) -> None:
    blocks = sections()
    lab.runs.mkdir(exist_ok=True)
    said = run_script(blocks[ROWS] + blocks[CLUSTER], lab.runs)
    assert "#SBATCH" in said, "the batch scripts of --print"
    assert (lab.runs / "runs" / "on-slurm" / "export").is_dir()
