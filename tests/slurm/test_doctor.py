"""laminar doctor on a Slurm: two machines look at each other, and each planted fault is one line.

The faults are planted by the program that starts Laminar on the machines (slurm.launch), on the
second of them, in a mount namespace that ends with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.conftest import ROOT, laminar
from tests.slurm.conftest import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.process]
GROUP = Path("/sys/fs/cgroup/memory/doctor")  #: a control group of version 1
MODEL = ROOT / "configs" / "models" / "spell-0.6m"


def doctor(lab: Lab, *words: str) -> tuple[int, list[str], str]:
    """Exit code, the lines about faults, and all."""
    place = [f"run.output_dir={lab.runs}", "run.name=checked", "slurm.rollouts=1"]
    config = str(ROOT / "configs/recipes/words/run.toml")
    done = laminar("doctor", "-c", config, *place, *words)
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    return done.returncode, faults, done.stdout + done.stderr


def planted(lab: Lab, what: str) -> list[str]:
    script = lab.directory / "launch.sh"
    script.write_text(f'#!/bin/bash\n[ "$SLURM_PROCID" = 0 ] || {{ {what}; }}\nexec "$@"\n')
    script.chmod(0o755)
    lab.runs.mkdir(exist_ok=True)
    return [f"slurm.launch=unshare -m {script}", f"slurm.setup=export PATH={_programs()}:$PATH"]


def _programs() -> Path:
    return ROOT / ".venv" / "bin"


def test_a_sound_cluster_has_no_fault(lab: Lab) -> None:
    lab.runs.mkdir(exist_ok=True)
    code, faults, said = doctor(lab, "trainer.nodes=2")
    assert (code, faults) == (0, []), said
    for subject in ("clock", "renames", "locks", "address", "ranks"):
        assert f" {subject} " in said, said
    assert list(lab.runs.iterdir()) == [] and not lab.queue()


@pytest.mark.parametrize(
    ("what", "subject", "mend"),
    [
        ("mount -t tmpfs none {runs}", "directory", "a file system that all machines share"),
        (f"mount -t tmpfs none {MODEL}", "model", "config.json"),
        (
            f"mkdir -p {GROUP}; echo 200M >{GROUP}/memory.limit_in_bytes; "
            f"echo $$ >{GROUP}/cgroup.procs",
            "memory",
            "more memory than there is",
        ),
    ],
)
def test_a_fault_of_the_other_machine_is_found(
    lab: Lab, what: str, subject: str, mend: str
) -> None:
    if str(GROUP) in what and not GROUP.parent.is_dir():
        pytest.skip("the memory of control groups is of version 2 here")
    many = ["rollout.replicas=100"]
    try:
        code, (fault,), said = doctor(lab, *planted(lab, what.format(runs=lab.runs)), *many)
    finally:
        if GROUP.is_dir():
            GROUP.rmdir()
    assert code == 1 and fault.split()[2] == subject and mend in fault, said
