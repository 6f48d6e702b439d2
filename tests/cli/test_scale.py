"""laminar scale: what it tells Slurm, which is played by scripts; tests/slurm has the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.cluster.slurm import Jobs, read_jobs, write_jobs
from laminar.names import exit_codes
from laminar.run.directory import run_config
from tests.launch.test_resume_check import run_of

JOBS = Jobs(service="7", rollouts=["8"], tasks=3)
QUEUE = [
    "7|7|7|RUNNING|n1|None",
    "8_1|8|8|RUNNING|n2|None",
    "8_2|9|8|RUNNING|n3|None",
    "8_3|8|8|PENDING||JobArrayTaskLimit",
]
EXTRA = ["11_4|12|11|RUNNING|n5|None", "11_10|11|11|RUNNING|n6|None"]


class Slurm:
    """Scripts that note how they were called."""

    def __init__(self, place: Path, run_dir: Path) -> None:
        self.run_dir, self._calls, self._queue = run_dir, place / "calls", place / "queue"
        for name, then in {
            "squeue": f"cat {self._queue}",
            "sbatch": f'echo sbatch "$@" >>{self._calls}; echo 11',
            "scontrol": f'echo scontrol "$@" >>{self._calls}',
            "scancel": f'echo scancel "$@" >>{self._calls}',
        }.items():
            (place / "bin").mkdir(exist_ok=True)
            (place / "bin" / name).write_text(f"#!/bin/sh\n{then}\n")
            (place / "bin" / name).chmod(0o755)

    def scale(self, count: int, queue: list[str]) -> int:
        self._queue.write_text("".join(f"{line}\n" for line in queue))
        self._calls.write_text("")
        return run_command(["scale", "--rollouts", str(count), str(self.run_dir)])

    @property
    def told(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    going = run_of(tmp_path)
    (going / "slurm").mkdir()
    (going / "slurm" / "rollout.sbatch").write_text("#!/bin/sh\n")
    write_jobs(going, JOBS)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Slurm(tmp_path, going)


def test_spares_are_let_run(slurm: Slurm) -> None:
    assert slurm.scale(3, QUEUE) == exit_codes.COMPLETE
    assert slurm.told == ["scontrol update JobId=8 ArrayTaskThrottle=3"]


def test_of_fewer_machines_the_last_ones_leave_and_no_spare_takes_their_place(slurm: Slurm) -> None:
    assert slurm.scale(1, QUEUE) == exit_codes.COMPLETE
    assert slurm.told == ["scontrol update JobId=8 ArrayTaskThrottle=1", "scancel 8_2"]


def test_what_the_array_has_not_is_one_more_array_with_numbers_of_its_own(slurm: Slurm) -> None:
    script = slurm.run_dir / "slurm" / "rollout.sbatch"
    assert slurm.scale(5, QUEUE) == exit_codes.COMPLETE
    assert slurm.told == [
        f"sbatch --parsable --array=4-5 {script.absolute()}",
        "scontrol update JobId=8 ArrayTaskThrottle=3",
    ]
    assert read_jobs(slurm.run_dir) == Jobs(service="7", rollouts=["8", "11"], tasks=5)


def test_the_added_array_leaves_first(slurm: Slurm) -> None:
    write_jobs(slurm.run_dir, Jobs(service="7", rollouts=["8", "11"], tasks=10))
    slurm.scale(4, [*QUEUE, *EXTRA])
    assert slurm.told == [
        "scontrol update JobId=8 ArrayTaskThrottle=3",
        "scontrol update JobId=11 ArrayTaskThrottle=1",
        "scancel 11_10",
    ]
    slurm.scale(2, [*QUEUE, *EXTRA])
    assert slurm.told == ["scontrol update JobId=8 ArrayTaskThrottle=2", "scancel 11"]


@pytest.mark.parametrize(
    ("count", "queue", "words"),
    [
        (0, QUEUE, ["--rollouts 0", "--pause"]),
        (2, [], ["no service in the queue", "submit --resume"]),
        (400, QUEUE, ["253"]),
    ],
)
def test_mistakes(
    slurm: Slurm, count: int, queue: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm.scale(count, queue) == exit_codes.USER_ERROR
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert slurm.told == [] and read_jobs(slurm.run_dir) == JOBS


def test_a_run_that_was_not_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going = run_of(tmp_path)
    assert run_config(going) and run_command(["scale", "--rollouts", "2", str(going)]) == 2
    assert "was not submitted" in capsys.readouterr().err
