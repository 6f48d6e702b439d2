"""Which runs `laminar train --resume` refuses: each in one sentence, with nothing changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from laminar.config import ConfigError, dump_config, load_config
from laminar.coordinator.system import RealDisk
from laminar.core.rules import NEW_RUN
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.base import Settings
from laminar.events.codec import decode_event
from laminar.launch import resume_check
from laminar.names import exit_codes, ids
from laminar.run.directory import RESUME_FILE, run_config
from laminar.run.lock import RunLock
from laminar.run.user_file import file_digests, run_file_digests
from laminar.training.trainer_state import LearnerFacts, ResumeState, decode, encode
from tests.run.conftest import laminar
from tools.kit.logs import write_log
from tools.kit.world import World
from tools.kit.world_parts import Faults

FACTS = LearnerFacts(torch="2", threads=1, micro_batch_tokens=1, reference="", moved={})
BASE = (
    "data.dataset=spell_backward",
    "model.name=org/model",
    "data.train_batch_size=2",
    "rollout.group_size=2",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
)


def run_of(
    tmp_path: Path, *overrides: str, step: int = 3, files: dict[str, str] | None = None
) -> Path:
    """The directory of a run that was cut off when it had completed so many steps, with a
    checkpoint of step 2; 0: one that has come to its end. It began with these `files`."""
    run = tmp_path / "run"
    place = (f"run.output_dir={tmp_path}", "run.name=run")
    config = load_config([], [*place, *BASE, *overrides])
    settings = msgspec.structs.replace(
        Settings.from_config(config, NEW_RUN), start_timeout_ms=60_000
    )
    log = World(settings, num_train=30, faults=Faults(save=1.0), seed=3).run().log
    first = log[0][0]
    assert isinstance(first.event, ev.CoordinatorStarted)
    began = msgspec.structs.replace(first.event, files=files or {})
    log[0] = (msgspec.structs.replace(first, event=began), log[0][1])
    done = [at for at, (s, _) in enumerate(log, 1) if isinstance(s.event, ev.StepCompleted)]
    run.mkdir()
    (run / "config.toml").write_text(dump_config(config))
    write_log(run, log[: done[step - 1] if step else None])
    if step and config.trainer.save_freq:
        chain = {t.step_index: t.chain for t in resume_check.state_of(run).steps.trained}[1]
        checkpoint(run, chain)
    return run


def checkpoint(run: Path, chain: str) -> Path:
    directory = run / "checkpoints" / "step_2"
    directory.mkdir(parents=True)
    made = ResumeState(version=2, step=2, before=chain, batches=(), learner=FACTS)
    (directory / RESUME_FILE).write_bytes(encode(made))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (directory / "model.safetensors").write_bytes(data)
    return directory


def content(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def refused(run: Path, *overrides: str) -> str:
    """Why; nothing in the directory has changed."""
    before = content(run)
    with pytest.raises(ConfigError) as error:
        resume_check.resumed_config(run, [], overrides)
    assert content(run) == before
    return str(error.value)


def test_a_run_that_was_cut_off_goes_on_with_what_may_be_changed(tmp_path: Path) -> None:
    """What its checkpoints are ahead of the log by is not looked at."""
    run = run_of(tmp_path)
    before = content(run)
    changed = ["trainer.total_training_steps=9", "rollout.replicas=3", "trainer.test_freq=7"]
    changed += ["trainer.save_freq=5", "trainer.save_minutes=1"]
    changed += ["store.payload_gb=0.5", "reward.trial=false"]
    config = resume_check.resumed_config(run, [], changed)
    trainer = config.trainer
    assert (trainer.total_training_steps, trainer.test_freq, trainer.save_freq) == (9, 7, 5)
    assert config.rollout.replicas == 3 and config.store.payload_gb == 0.5
    assert not config.reward.trial
    assert config.run_dir == run and content(run) == before
    same = resume_check.resumed_config(run, [str(run / "config.toml")], ["seed=5"])
    with pytest.raises(ConfigError, match="seed = 5, but the run began with 0"):
        resume_check.check_unchanged(run_config(run), same)


def test_what_the_start_chose_stays(tmp_path: Path) -> None:
    """With files as without: another machine, or more replicas, would choose otherwise."""
    run = run_of(tmp_path, "rollout.replicas=1", "rollout.max_num_seqs=300")
    (mine := tmp_path / "mine.toml").write_text("seed = 0\n")
    for files in ([], [mine]):
        config = resume_check.resumed_config(run, files, [*BASE, "rollout.replicas=3"])
        assert (config.repack.policy, config.rollout.max_num_seqs) == ("off", 300)
        resume_check.check_unchanged(run_config(run), config)
    assert resume_check.resumed_config(run, files, [*BASE]).rollout.replicas == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seed=3", "seed = 3, but the run began with 0: when a run is resumed, only"),
        ("model.name=other", "model.name = 'other', but the run began with"),
        ("data.dataset=gsm8k", "data.dataset = 'gsm8k', but the run began with"),
        ("rollout.group_size=4", "rollout.group_size = 4, but the run began with 2"),
        ("trainer.save_freq=0", "trainer.save_freq = 0 cannot be set when a run is resumed"),
        ("trainer.total_training_steps=2", "has completed 3 steps already"),
    ],
)
def test_a_setting_that_may_not_be_changed_is_named(
    tmp_path: Path, setting: str, said: str
) -> None:
    assert said in refused(run_of(tmp_path), setting)


def test_a_run_that_cannot_go_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run directory: it has no config.toml" in refused(tmp_path / "empty")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_text(dump_config(load_config([], BASE)))
    assert "has no event log" in refused(bare)
    (bare / "events").mkdir()
    said = refused(bare)
    assert "has an empty event log" in said and "start it again, with --move-old" in said


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, "trainer.save_freq=0")
    assert "keeps no checkpoints (trainer.save_freq = 0)" in refused(run)


def fork_of(tmp_path: Path) -> Path:
    """The directory of a fork that was cut off before its trainer was ready."""
    run = tmp_path / "run"
    place = (f"run.output_dir={tmp_path}", "run.name=run")
    config = load_config([], [*place, *BASE])
    settings = Settings.from_config(config, NEW_RUN)
    (stamped, commands), *_ = World(settings, num_train=30, seed=3).run().log
    assert isinstance(stamped.event, ev.CoordinatorStarted)
    origin = ev.ForkOrigin(
        run="runs/other",
        step=2,
        version=2,
        digest="chain",
        data="d",
        num_train=30,
        cursor=4,
        seed=0,
        shuffle=True,
        unfinished=(),
    )
    first = msgspec.structs.replace(stamped.event, origin=origin)
    run.mkdir()
    (run / "config.toml").write_text(dump_config(config))
    write_log(run, [(msgspec.structs.replace(stamped, event=first), commands)])
    checkpoint(run, "chain").rename(run / "origin")
    (run / "checkpoints").rmdir()
    return run


def test_a_fork_without_a_checkpoint_of_its_own_goes_on_with_what_it_began_with(
    tmp_path: Path,
) -> None:
    run = fork_of(tmp_path)
    assert resume_check.resumed_config(run, [], []).run_dir == run
    (run / "origin" / RESUME_FILE).write_bytes(b"{")
    assert f"checkpoint {run / 'origin'} is damaged" in refused(run)
    shutil.rmtree(run / "origin")
    said = refused(run)
    assert (
        f"no checkpoint of step 2 or later is in {run / 'checkpoints'}, nor {run / 'origin'}"
        in said
    )


def test_a_run_that_is_complete_is_refused_with_what_to_do(tmp_path: Path) -> None:
    said = refused(run_of(tmp_path, step=0))
    assert "is finished after step 4 and cannot be resumed" in said and "--at-step 4" in said


def test_a_run_that_goes_on_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    lock = RunLock.join(run, "node-0")
    assert f"is in use by node-0 (pid {os.getpid()})" in refused(run)
    with pytest.raises(ConfigError, match="is in use by node-0"):
        RunLock.join_idle_run(run, "train")
    lock.close()
    RunLock.join_idle_run(run, "train").close()


def test_other_data_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(ConfigError, match="the data have digest other, but the run"):
        resume_check.check_data(run, resume_check.find_data_digest(run), "other")
    (loaded,) = {e.digest for e in map(_event, read_log(RealDisk(run / "events"))) if e}
    assert resume_check.find_data_digest(run) == loaded
    resume_check.check_data(run, loaded, loaded)
    resume_check.check_data(run, "", loaded)


def test_another_file_of_the_users_loss_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def loss(batch): ...")
    key = "algorithm.policy_loss.loss_mode"
    run = run_of(tmp_path, f"{key}={mine}:loss")
    said = refused(run)
    now = file_digests({key: f"{mine}:loss"})[key]
    assert f"{key}: its file now has digest {now}, but the run began with" in said
    assert "restore that file" in said
    mine.unlink()
    assert f"{key} = '{mine}:loss' cannot be read" in refused(run)


def test_another_file_of_the_reward_is_warned_of(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    for path in (mine, other):
        path.write_text("def score(completion): return 1.0")
    listed = f'reward.functions=[{{path="{mine}"}},{{name="math"}},{{path="{other}"}}]'
    settings = (listed, f"algorithm.batch_strategy={other}:score")
    config = load_config([], [*BASE, *settings])
    then = run_file_digests(config)
    assert list(then) == [str(mine), str(other)]
    run = run_of(tmp_path, *settings, files=then)
    assert resume_check.find_changed_files(run, config) == {}
    for path in (mine, other):
        path.write_text(f"def score(completion): return len({path.name!r})")
    now = run_file_digests(config)
    found = resume_check.find_changed_files(run, config)
    assert list(found) == [f"file-changed/{now[str(path)][:8]}" for path in (mine, other)]
    for path, text in zip((str(mine), str(other)), found.values(), strict=True):
        assert all(part in text for part in (path, now[path], then[path]))
    other.unlink()
    assert list(resume_check.find_changed_files(run, config)) == list(found)[:1]


def test_an_environment_is_such_a_file_and_an_older_log_has_no_digests(tmp_path: Path) -> None:
    mine, games = tmp_path / "mine.py", tmp_path / "games.py"
    for path in (mine, games):
        path.write_text("def score(completion): return 1.0")
    settings = (f"env.path={games}", f"reward.custom_reward_function.path={mine}")
    config = load_config([], [*BASE, *settings])
    assert list(run_file_digests(config)) == [str(mine), str(games)]
    assert resume_check.find_changed_files(run_of(tmp_path, *settings), config) == {}


def _event(item: tuple[object, object]) -> ev.DataLoaded | None:
    record = item[1]
    event = decode_event(record.event) if isinstance(record, EventRecord) else None
    return event if isinstance(event, ev.DataLoaded) else None


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"no")


def _words(directory: Path) -> None:
    (directory / RESUME_FILE).write_text("{}")


def _foreign(directory: Path) -> None:
    found = decode((directory / RESUME_FILE).read_bytes())
    changed = msgspec.structs.replace(found, before=ids.extend_chain_digest("", ("0.0.0",)))
    (directory / RESUME_FILE).write_bytes(encode(changed))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_cut, "is damaged (model.safetensors is cut off)"),
        (_header, "is damaged ("),
        (_words, "is damaged (its trainer.json is damaged"),
        (_foreign, "belongs to another run"),
    ],
)
def test_a_checkpoint_that_is_no_good_is_named(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    run = run_of(tmp_path)
    harm(run / "checkpoints" / "step_2")
    assert f"checkpoint {run}/checkpoints/step_2 {said}" in refused(run)


def test_it_ends_with_the_code_of_a_mistake(tmp_path: Path) -> None:
    done = laminar("train", "--resume", str(tmp_path))
    assert (done.returncode, done.stdout) == (exit_codes.USER_ERROR, "")
    assert done.stderr == (f"laminar: {tmp_path} is not a run directory: it has no config.toml\n")


def test_a_run_that_was_moved_is_where_it_is_now(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    there = tmp_path / "elsewhere" / "renamed"
    there.parent.mkdir()
    run.rename(there)
    config = resume_check.resumed_config(there, [], [])
    assert config.run_dir == there and config.run.name == "renamed"
    resume_check.claim_run_directory(config, there, {}).close()
    assert run_config(there).run_dir == there


def test_a_run_without_a_secret_gets_one_when_it_is_resumed(tmp_path: Path) -> None:
    """And keeps the one that it has; one that others can read is refused before anything else."""
    run = run_of(tmp_path)
    config = resume_check.resumed_config(run, [], [])
    resume_check.claim_run_directory(config, run, {}).close()
    secret = (run / "secret").read_bytes()
    resume_check.claim_run_directory(config, run, {}).close()
    assert (run / "secret").read_bytes() == secret
    (run / "secret").chmod(0o644)
    assert "open to other users (mode 0644)" in refused(run)
