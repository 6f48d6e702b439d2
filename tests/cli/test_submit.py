"""laminar submit: what it asks of Slurm, and that a refusal leaves nothing behind.

Slurm is played here by scripts that write down how they were called; tests/slurm has the real one.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.cli.submit import load_slurm_config
from laminar.cluster import slurm
from laminar.cluster.job_scripts import JobScripts, scripts_of
from laminar.cluster.slurm import Jobs, read_jobs, resume_command, write_jobs
from laminar.config import ConfigError, load_config
from laminar.names import exit_codes
from laminar.run.directory import run_config
from tests.launch.test_resume_check import run_of
from tools.kit import golden_pages

CLUSTER = "configs/cluster.toml"
EMULATED = ["rollout.engine=emulated", "data.dataset_size=100", "data.val_size=2", "run.name=run"]
SBATCH = """\
case "$*" in
*--test-only*)
  [ -z "$SAYS" ] || { echo "$SAYS" >&2; exit 1; }
  grep -q nowhere && { echo "sbatch: error: invalid partition" >&2; exit 1; }
  exit 0 ;;
*rollout.sbatch) [ -z "$NO_ARRAY" ] || { echo "sbatch: error: no more jobs" >&2; exit 1; } ;;
esac
echo "$((100 + $(wc -l <"$CALLS")))"
"""
Submit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the commands of Slurm were called with, a line each."""
    programs, file = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    file.touch()
    for name, then in {"sbatch": SBATCH, "scancel": "", "squeue": 'echo "$QUEUE"'}.items():
        program = programs / name
        program.write_text(f'#!/bin/bash\necho {name} "$@" >>"$CALLS"\n{then}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(file))
    return file


@pytest.fixture
def submit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Submit:
    def call(*words: str) -> tuple[int, str, str]:
        place = [] if "--resume" in words else [*EMULATED, f"run.output_dir={tmp_path / 'runs'}"]
        code = run_command(["submit", *words, *place])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def scripts(*overrides: str) -> JobScripts:
    return scripts_of(load_slurm_config([CLUSTER], list(overrides)), Path("/shared/me/runs/math"))


def test_the_scripts_are_for_people_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the plan's first reader looks at them: they are a page of this project."""
    given = scripts("slurm.setup=source /shared/me/venv/bin/activate", "slurm.spares=1")
    golden_pages.check("submit", f"{given.service}\n{given.build_array('rollout', '81234')}")


@pytest.mark.parametrize(
    ("overrides", "replicas"),
    [
        ([], (7, 8, 39)),
        (["rollout.vllm.tensor_parallel_size=2"], (3, 4, 19)),
        (["rollout.vllm.tensor_parallel_size=8"], (0, 1, 4)),
        (["slurm.gpus=1"], (0, 1, 4)),
        (["trainer.ranks=4"], (4, 8, 36)),
        (["trainer.ranks=5", "rollout.vllm.tensor_parallel_size=2"], (1, 4, 17)),
        (["trainer.ranks=8"], (0, 8, 32)),
        (["rollout.replicas=16"], (14, 16, 78)),
        (["rollout.replicas_on_trainer_node=2"], (2, 8, 34)),
        (["slurm.gpus=0", "slurm.rollouts=2"], (2, 2, 6)),
    ],
)
def test_there_are_as_many_replicas_as_gpus_allow(
    overrides: list[str], replicas: tuple[int, int, int]
) -> None:
    """On the service's machine one GPU is the trainer's."""
    config = load_slurm_config([CLUSTER], overrides)
    assert (config.replicas_on(0), config.replicas_on(1), config.total_replicas) == replicas
    waits = config.coordinator.start_timeout_s
    assert waits == (300 if config.replicas_on(0) else 86_400)


def test_more_gpus_for_a_replica_than_a_machine_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"slurm.gpus = 8 .*tensor_parallel_size = 16"):
        load_slurm_config([CLUSTER], ["rollout.vllm.tensor_parallel_size=16"])


def test_what_is_asked_of_a_machine_follows_the_settings() -> None:
    assert "--exclusive\n#SBATCH --mem=0" in scripts().service
    shared = scripts("slurm.exclusive=no", "slurm.cpus=8", "slurm.mem=64G", "slurm.extra=[--qos=q]")
    assert "--exclusive" not in shared.service
    for option in ("--cpus-per-task=8", "--mem=64G", "--qos=q"):
        assert f"#SBATCH {option}\n" in shared.service and option in shared.build_array("rollout")
    assert "exec apptainer exec --nv i.sif laminar serve /" in (
        scripts("slurm.launch=apptainer exec --nv i.sif").service
    )


def test_a_directory_that_a_script_cannot_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="character that a batch script cannot name"):
        scripts_of(load_config([CLUSTER]), Path("/shared/my runs/a%b"))


def test_the_service_is_queued_and_then_the_rollouts_after_it(
    submit: Submit, calls: Path, tmp_path: Path
) -> None:
    code, out, err = submit("-c", CLUSTER, "slurm.spares=1")
    place = tmp_path / "runs" / "run"
    assert (code, err) == (exit_codes.COMPLETE, "")
    assert "1 machine, 8 GPUs: coordinator, store, trainer, 7 replicas" in out
    assert "4 of 5 machines at a time, 8 GPUs: 8 replicas each" in out
    assert "40 GPUs at a time, 960 GPU-hours" in out
    assert "queued     service 103, rollout 104_[1-5%4]" in out
    asked = [line.split() for line in calls.read_text().splitlines()]
    assert [words[1] for words in asked] == ["--test-only"] * 2 + ["--parsable"] * 2
    service, rollout = (place / "slurm" / f"{kind}.sbatch" for kind in ("service", "rollout"))
    assert [words[2] for words in asked[2:]] == [str(service), str(rollout)]
    assert "--dependency=after:103\n" in rollout.read_text()
    assert read_jobs(place) == Jobs(service="103", rollouts=["104"])
    config = run_config(place)
    assert (config.coordinator.host, config.run.nodes) == ("auto", 5)
    assert (place / "logs" / "slurm").is_dir()
    assert (place / "secret").stat().st_mode & 0o777 == 0o600


def test_the_further_nodes_of_the_trainer_are_an_array(
    calls: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are counted, and the run waits for them as long as for machines in the queue."""
    asked = ["trainer.nodes=3", "trainer.ranks=8", "slurm.trainer_spares=1", "slurm.rollouts=2"]
    asked += ["slurm.gpus=8", "slurm.time=10:00:00", "run.name=run", f"run.output_dir={tmp_path}"]
    assert run_command(["submit", "-c", "configs/recipes/words/run.toml", *asked]) == 0
    out, place = capsys.readouterr().out, tmp_path / "run"
    assert "\ntrainer    2 of 3 machines at a time, 8 GPUs: 8 ranks each" in out
    assert "40 GPUs at a time, 400 GPU-hours" in out
    assert "queued     service 104, trainer 105_[1-3%2], rollout 106_[1-2%2]" in out
    assert read_jobs(place) == Jobs(service="104", trainers=["105"], rollouts=["106"])
    assert calls.read_text().count("--test-only") == 3
    script = (place / "slurm" / "trainer.sbatch").read_text()
    assert "--dependency=after:104\n" in script and "# trainer, 8 ranks; written" in script
    assert f'serve {place} --trainer-node "$SLURM_ARRAY_TASK_ID"' in script
    assert run_config(place).coordinator.start_timeout_s == 86_400


def test_print_shows_the_scripts_and_asks_nothing(
    submit: Submit, calls: Path, tmp_path: Path
) -> None:
    code, out, _ = submit("-c", CLUSTER, "--print")
    assert code == exit_codes.COMPLETE
    assert "exec " in out and "#SBATCH --array=1-4%4" in out
    assert not calls.read_text() and not (tmp_path / "runs").exists()


def test_what_the_login_node_has_does_not_matter(submit: Submit) -> None:
    """Its port is taken, and the nodes' may be free."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        code, _, said = submit("--print", f"coordinator.port={taken.getsockname()[1]}")
    assert (code, said) == (exit_codes.COMPLETE, "")


def refused(submit: Submit, *words: str) -> str:
    code, _, err = submit(*words)
    assert (code, err.count("\n")) == (exit_codes.USER_ERROR, 1), err
    return err


def test_what_slurm_would_refuse_leaves_nothing(
    submit: Submit, calls: Path, tmp_path: Path
) -> None:
    said = refused(submit, "-c", CLUSTER, "slurm.partition=nowhere")
    assert "invalid partition; the service job asks for slurm.partition = 'nowhere'" in said
    assert calls.read_text() == "sbatch --test-only\n" and not (tmp_path / "runs" / "run").exists()


def test_where_one_job_is_refused_none_is_queued(
    submit: Submit, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_ARRAY", "1")
    assert "no more jobs; the rollout job asks for" in refused(submit, "-c", CLUSTER)
    assert calls.read_text().splitlines()[-1] == "scancel 103"
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.usefixtures("calls")
def test_a_controller_that_does_not_answer_refuses_nothing(
    submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there is nothing to correct."""
    lost = "Unable to contact slurm controller (connect failure)"
    monkeypatch.setenv("SAYS", f"sbatch: error: Batch job submission failed: {lost}")
    said = refused(submit, "-c", CLUSTER)
    assert "does not answer sbatch: Unable to contact" in said and "try again" in said
    assert "correct" not in said


def test_no_task_has_a_higher_number_than_a_machine_may(submit: Submit) -> None:
    said = refused(submit, "-c", CLUSTER, "slurm.rollouts=200", "slurm.spares=54")
    assert "slurm.rollouts + slurm.spares = 254" in said and "has at most 253 machines" in said


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    assert "train --resume" in resume_command(tmp_path)
    write_jobs(tmp_path, Jobs(service="7"))
    assert "submit --resume" in resume_command(tmp_path)


def test_without_slurm_there_is_nothing_to_submit_to(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert "there is no sbatch on this machine" in refused(submit, "-c", CLUSTER)
    assert not (tmp_path / "runs" / "run").exists()


def test_a_directory_in_the_memory_of_this_machine_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No node sees it."""
    code = run_command(["submit", "-c", CLUSTER, *EMULATED, "run.output_dir=/dev/shm"])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (exit_codes.USER_ERROR, 1)
    assert "/dev/shm/run is in /dev/shm, in the memory of this machine (tmpfs)" in said


def test_a_run_that_exists_is_resumed_and_not_submitted_again(
    submit: Submit, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    assert "--resume" in refused(submit, "-c", CLUSTER)


def test_a_run_goes_on_with_its_own_settings_and_what_is_changed(
    submit: Submit, calls: Path, tmp_path: Path
) -> None:
    """On other machines than before, if that is asked for."""
    asked = [*EMULATED, "coordinator.host=auto", "slurm.rollouts=1", "run.nodes=2"]
    going = run_of(tmp_path, *asked, "reward.scope=trajectory")
    assert "without -c" in refused(submit, "--resume", str(going), "-c", CLUSTER)
    changed = ["slurm.rollouts=3", "slurm.time=1:00:00", "reward.trial=false"]
    before = run_config(going)
    code, out, err = submit("--resume", str(going), "--print", *changed)
    assert (code, err) == (exit_codes.COMPLETE, ""), err
    assert "#SBATCH --array=1-3%3" in out and "#SBATCH --time=1:00:00" in out
    assert "replicas   8 " in out
    assert not calls.read_text() and run_config(going) == before


def test_a_run_with_jobs_in_the_queue_is_not_submitted_beside_them(
    submit: Submit, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = run_of(tmp_path)
    (going / "slurm").mkdir()
    write_jobs(going, Jobs(service="7", rollouts=["8"]))
    rows = ["7|7|7|RUNNING|n1|None", "8_[2-3%2]|8|8|PENDING||Priority", "9|9|9|RUNNING|n2|None"]
    monkeypatch.setenv("QUEUE", "\n".join(rows))
    said = refused(submit, "--resume", str(going))
    assert "7 (running), 8_[2-3%2] (pending)" in said and "scancel 7 8" in said
    assert "9" not in said.partition("queue")[2]
