"""A run whose directory is on a file server that restarts: it waits, then it continues."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from tests.run.conftest import Finished, begun, check_books, command

FAILS_S = 6.0
SETTINGS = [
    "rollout.engine=emulated",
    "data.val_size=0",
    "data.max_prompt_length=64",
    "data.max_response_length=400",
    "data.train_batch_size=4",
    "rollout.replicas=2",
    "rollout.group_size=4",
    "rollout.max_num_seqs=16",
    "trainer.total_training_steps=20",
    "trainer.test_freq=0",
    "trainer.save_freq=5",
    "emulation.train_s=0.3",
    "emulation.median_response=60",
]


@pytest.mark.process
@pytest.mark.long
def test_a_run_whose_disk_stays_full_ends_with_the_reason(tmp_path: Path, shim: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    environment = {"LD_PRELOAD": shim, "FAILING_DIR": run, "FAILING_FLAG": flag}
    limit = "coordinator.disk_full_timeout_s=5"
    train = command("train", f"run.output_dir={tmp_path}", "run.name=run", *SETTINGS, limit)
    with begun(run, train, **{name: str(value) for name, value in environment.items()}) as process:
        flag.write_text(str(errno.ENOSPC))
        output, _ = process.communicate(timeout=150)
    assert process.returncode not in (0, None), output
    assert "coordinator.disk_full_timeout_s" in output and "the disk" in output


@pytest.mark.process
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_run_whose_disk_fails_for_seconds_completes(
    tmp_path: Path, shim: Path, number: int
) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    environment = {"LD_PRELOAD": shim, "FAILING_DIR": run, "FAILING_FLAG": flag}
    train = command("train", f"run.output_dir={tmp_path}", "run.name=run", *SETTINGS)
    with begun(run, train, **{name: str(value) for name, value in environment.items()}) as process:
        flag.write_text(str(number))
        time.sleep(FAILS_S)
        flag.unlink()
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert f"[Errno {number}]" in output and "steps            20 in" in output
    check_books(Finished(run, 0, output))
