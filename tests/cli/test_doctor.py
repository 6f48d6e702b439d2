"""laminar doctor: each planted fault is one line that says how to mend it; a sound set-up has none.

Slurm is played by a script here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from laminar.cli import doctor
from laminar.cli.commands import run_command
from laminar.config import ConfigError
from laminar.launch import memory_check
from laminar.names import exit_codes
from laminar.run.secret import make_secret

ROOT = Path(__file__).parents[2]
QUICKSTART = "configs/recipes/words/run.toml"
SBATCH = """#!/bin/bash
grep -q 'partition=nowhere' || exit 0
echo "sbatch: error: invalid partition specified: nowhere" >&2
exit 1
"""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The quickstart names its model from there."""
    monkeypatch.chdir(ROOT)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH)
    (programs / "sbatch").chmod(0o755)
    (programs / "srun").write_text(
        '#!/bin/bash\n[ -z "$BUSY" ] || { echo "$BUSY" >&2; exit 1; }\nprintf "[%s][]\\n" 0 1\n'
    )
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def faults(capsys: pytest.CaptureFixture[str], place: Path, *words: str) -> list[str]:
    """The lines about what is wrong; the exit code agrees with them."""
    code = run_command(
        ["doctor", "-c", QUICKSTART, f"run.output_dir={place}", "run.name=run", *words]
    )
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok ", "FAULT ")) for line in lines), lines
    found = [line for line in lines if line.startswith("FAULT")]
    assert code == (exit_codes.FAILED if found else exit_codes.COMPLETE)
    assert last == (f"{len(found)} to fix" if found else "no faults found")
    return found


def test_a_sound_set_up_has_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing of what was tried is left."""
    before = sorted(tmp_path.iterdir())
    assert faults(capsys, tmp_path) == []
    assert faults(capsys, tmp_path, "slurm.partition=gpu", "slurm.rollouts=2") == []
    assert run_command(["doctor"]) == exit_codes.COMPLETE
    assert sorted(tmp_path.iterdir()) == before


def open_secret(place: Path) -> list[str]:
    (place / "run").mkdir()
    make_secret(place / "run")
    (place / "run" / "secret").chmod(0o644)
    return []


def cut_model(place: Path) -> list[str]:
    (place / "model").mkdir()
    return [f"model.name={place / 'model'}"]


def port_taken(place: Path) -> list[str]:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return [f"coordinator.port={taken.getsockname()[1]}"]


taken = socket.socket()
Plant = Callable[[Path], list[str]]


@pytest.mark.parametrize(
    ("plant", "name", "words"),
    [
        (lambda place: ["run.output_dir=/proc/runs"], "directory", ["cannot be", "output_dir"]),
        (open_secret, "secret", ["mode 0644", "remove the file"]),
        (cut_model, "model", ["model.name", "config.json"]),
        (
            lambda place: ["data.dataset=", f"data.train_files=[{place}/no.jsonl]"],
            "data",
            ["no.jsonl"],
        ),
        (
            lambda place: [f"reward.custom_reward_function.path={place}/no.py"],
            "reward",
            ["no.py", "custom_reward_function"],
        ),
        (port_taken, "machine", ["coordinator.port", "choose another"]),
        (lambda place: ["trainer.device=cuda"], "machine", ["trainer.device", "'auto' or 'cpu'"]),
        (
            lambda place: ["weights.max_bytes=1000"],
            "memory",
            ["weights.max_bytes = 1000", "set it"],
        ),
        (
            lambda place: ["slurm.partition=nowhere", "slurm.rollouts=1"],
            "slurm",
            ["invalid partition specified: nowhere", "slurm.partition = 'nowhere'"],
        ),
        (lambda place: ["trainer.nonsense=1"], "settings", ["trainer.nonsense"]),
    ],
)
def test_a_planted_fault_is_one_line_with_its_mend(
    plant: Plant, name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = faults(capsys, tmp_path, *plant(tmp_path))
    assert found.split()[1] == name and all(word in found for word in words), found


def test_what_is_behind_a_fault_is_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = [*open_secret(tmp_path), *cut_model(tmp_path), "trainer.device=cuda"]
    found = faults(capsys, tmp_path, *planted, "coordinator.host=no.invalid")
    assert [line.split()[1] for line in found] == ["secret", "model", "machine"]


def test_machines_that_slurm_does_not_give_are_a_line_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSY", "srun: error: Unable to allocate resources")
    (found,) = faults(capsys, tmp_path, "slurm.rollouts=1")
    assert "Unable to allocate resources" in found and "try again when two are free" in found


def test_memory_of_the_job_counts_and_not_that_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "memory_limit", lambda: 80 << 20)
    (found,) = faults(capsys, tmp_path)
    assert found.split()[1] == "memory" and "of 0.084 GB" in found and "set " in found


def test_a_full_shared_memory_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = doctor.shutil.disk_usage
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: type(usage("/"))(10**10, 10**10, 0)
    )
    (found,) = faults(capsys, tmp_path)
    assert found.split()[1] == "memory" and "laminar clean" in found


def test_a_name_that_only_this_machine_reaches_is_no_address_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ip_of", lambda host, key: "127.0.1.1")
    (found,) = faults(capsys, tmp_path, "coordinator.host=auto")
    assert found.split()[1] == "name" and "127.0.1.1" in found and "/etc/hosts" in found
    assert faults(capsys, tmp_path) == []


@pytest.mark.parametrize(
    ("broken", "words"), [("try_lock", "does not keep file locks"), ("_sync_s", "a sync in")]
)
def test_a_file_system_that_a_run_cannot_have(
    broken: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, broken, lambda *_: 1.0)
    (found,) = faults(capsys, tmp_path)
    assert found.split()[1] == "directory" and words in found and "run.output_dir" in found


def test_a_file_that_others_can_read_whatever_is_asked_for_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mode").touch(0o644)
    with pytest.raises(ConfigError, match=r"no file modes \(0600 becomes 0644\)"):
        doctor._check_modes(tmp_path / "made" / "mode")


def test_a_database_that_no_log_can_lie_beside_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "WRITER_PRAGMAS", ["PRAGMA journal_mode = memory"])
    with pytest.raises(ConfigError, match="local disk"):
        doctor._check_directory(tmp_path / "run")
