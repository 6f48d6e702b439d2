"""The trainer with a real store and relay, in one process: the text of its probe, and rows that it
does not train."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace
from structlog.testing import capture_logs

from laminar.actors.trainer import Trainer
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import ids
from laminar.names.ids import TrajectoryId
from laminar.run.directory import RESUME_FILE, TRAINER_BOOK_FILE, VERSION_FILE
from laminar.storage import messages as m
from laminar.training import distributed_learner, trainer_state
from laminar.training.checkpoints import checkpoint
from laminar.training.trainer_state import CheckpointError
from laminar.weights.version import manifest as mf
from tests.actors.parts import FakeHost, order, until
from tests.actors.trained import Processes, load, stored


@pytest_asyncio.fixture
async def trainer(processes: Processes) -> Trainer:
    found: Trainer = await processes.start("trainer-0")
    return found


async def test_the_probe_is_text_of_the_run_and_the_weights_score_it(trainer: Trainer) -> None:
    sample = m.SamplePrompts(count=256)
    prompts = (await trainer.store.send_request(sample, m.SamplePromptsReply)).prompts
    text = b" ".join(prompts)
    probe = await trainer._measure_probe()
    assert len(probe.sequences) >= 8 and sum(map(len, probe.sequences)) >= 200
    for sequence in probe.sequences:
        ids = np.array(sequence, "<i4").tobytes()
        assert ids in text or ids in b"".join(prompts)
    assert probe.mean_tolerance == 1e-4 and probe.tolerance == pytest.approx(1e-3)
    again = await trainer.learner.compute_logprobs([list(s) for s in probe.sequences])
    assert [list(row) for row in probe.logprobs] == again


async def test_a_replica_with_other_weights_is_named_before_its_rows_are_trained(
    trainer: Trainer,
) -> None:
    """In the event and in the trainer's book; the rows of the other one are trained, and it is not
    blamed for one that it has finished."""
    well, sick = ("rollout-0", 0.0), ("rollout-1", 0.5)
    rows = [
        await stored(trainer, group, sibling, *parts)
        for group, pair in enumerate([([well], [well]), ([sick], [sick, well])])
        for sibling, parts in enumerate(pair)
    ]
    batch = tuple(map(TrajectoryId, rows))
    command = cmd.TrainStep(to="trainer-0", step_index=0, version=1, trajectories=batch)
    trainer.handle_orders(order(1, command))
    host: FakeHost = trainer.host  # type: ignore[assignment]
    done = await host.wait(ev.StepCompleted)
    (part,) = done.left_out
    assert (part.replica, part.version, part.trajectories) == ("rollout-1", 0, batch[2:])
    assert part.diff == pytest.approx(0.5, abs=1e-4) and part.limit < 0.01
    assert done.changed and done.metrics["mismatch/left_out"] == 2
    assert done.metrics["by_origin/mismatch_kl/rollout-1/0"] > 0.1
    (line,) = map(json.loads, (host.run_dir / TRAINER_BOOK_FILE).read_text().splitlines())
    assert line["ids"] == rows and line["left_out"] == rows[2:]
    assert line["incarnation"] == 3


async def train(trainer: Trainer, step: int) -> ev.StepCompleted:
    """Two rows of another prompt in each step, with its checkpoint."""
    host: FakeHost = trainer.host  # type: ignore[assignment]
    count = len(host.all(ev.StepCompleted))
    rows = [await stored(trainer, step, sibling, ("rollout-0", 0.0)) for sibling in (0, 1)]
    command = cmd.TrainStep(
        to="trainer-0",
        step_index=step,
        version=step + 1,
        trajectories=tuple(map(TrajectoryId, rows)),
    )
    trainer.handle_orders(order(step + 1, command))
    done = await host.wait(ev.StepCompleted, count + 1)
    await host.wait(ev.CheckpointSaved, count + 1)
    return done


def compared(logged: Sequence[Mapping[str, Any]]) -> list[str]:
    return [entry["compared"] for entry in logged if entry["event"] == "weights-match"]


async def test_a_new_run_compares_values_with_the_files_before_it_is_ready(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as logged:
        await processes.start("trainer-0")
    assert compared(logged) == ["values in float32"]
    await processes.kill()
    usual = distributed_learner.iter_weight_rows
    other = lambda model: ((f"x.{name}", rows) for name, rows in usual(model))  # noqa: E731
    monkeypatch.setattr(distributed_learner, "iter_weight_rows", other)
    with pytest.raises(ConfigError, match=r"x\.model\.\S+ is not in the files"):
        await processes.start("trainer-0")
    assert not processes.hosts[-1].all(ev.TrainerReady)


def weights(trainer: Any) -> list[bytes]:
    found = trainer.learner.worker.iter_weight_rows()
    return [rows.data.numpy().tobytes() for _, rows in found]


async def test_one_that_was_killed_goes_on_from_its_checkpoint(
    processes: Processes, trainer: Trainer
) -> None:
    """It names what is on the disk, loads what it is told, and does a step again: to the same
    weights, which go to nobody; the other checkpoint is not kept, and goes."""
    await train(trainer, 0)
    done = await train(trainer, 1)
    expected = weights(trainer)
    relay = processes.hosts[1]
    published = {v.version: v.digest for v in relay.all(ev.WeightsPublished)}
    await processes.kill()
    with capture_logs() as logged:
        again: Any = await processes.start("trainer-0")
    host = processes.hosts[-1]
    (ready,) = host.all(ev.TrainerReady)
    rows = [(f"0.{step}.0", f"0.{step}.1") for step in (0, 1)]
    assert [(c.version, c.step, c.digest) for c in ready.checkpoints] == [
        (1, 1, ids.extend_chain_digest("", rows[0])),
        (2, 2, ids.extend_chain_digest("", *rows)),
    ]
    assert weights(again) != expected
    assert compared(logged) == ["names and shapes"]
    again.handle_orders(order(10, load(ready.checkpoints[0])))
    loaded = await host.wait(ev.CheckpointLoaded)
    assert (loaded.version, loaded.step) == (1, 1)
    await until(lambda: not (host.run_dir / "checkpoints" / "step_2").exists())
    repeat = cmd.RepeatStep(
        to="trainer-0", step_index=1, version=2, trajectories=rows[1], digest=published.get(2, "")
    )
    again.handle_orders(order(11, repeat))
    repeated = await host.wait(ev.StepRepeated)
    manifest = mf.decode((host.run_dir / ready.checkpoints[0].path / VERSION_FILE).read_bytes())
    assert repeated.digest != manifest.digest and repeated.published in ("", repeated.digest)
    assert weights(again) == expected and done.changed
    lines = (host.run_dir / TRAINER_BOOK_FILE).read_text().splitlines()
    assert len(lines) == 2 and not host.all(ev.StepCompleted)
    await train(again, 2)
    saved = trainer_state.decode(
        (host.run_dir / "checkpoints" / "step_3" / RESUME_FILE).read_bytes()
    )
    assert saved.before == ids.extend_chain_digest("", rows[0])
    assert saved.batches == (rows[1], ("0.2.0", "0.2.1"))


@pytest.mark.parametrize(("limit_s", "failures"), [(300.0, 2), (0.2, 10**9)])
async def test_a_disk_that_fails_for_seconds_does_not_damage_a_checkpoint(
    limit_s: float,
    failures: int,
    processes: Processes,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read again until coordinator.disk_full_timeout_s is over; then it is set aside."""
    host: FakeHost = trainer.host  # type: ignore[assignment]
    await train(trainer, 0)
    directory, checkpoints = host.run_dir / "checkpoints" / "step_1", trainer.checkpoints
    assert checkpoints is not None
    fails = iter(range(failures))

    def check_digests(directory: Path) -> None:
        if next(fails, None) is not None:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "check_digests", check_digests)
    coordinator = replace(host.config.coordinator, disk_full_timeout_s=limit_s)
    host.config = replace(host.config, coordinator=coordinator)
    command = cmd.LoadCheckpoint(
        to="trainer-0", version=1, step=1, path="checkpoints/step_1", kept=(1,)
    )
    loading = trainer._load_checkpoint(order(9, command)[0][0], command, checkpoints)
    if limit_s < 1:
        with pytest.raises(CheckpointError, match=r"could not be read for 0.2 s"):
            await loading
        assert not directory.exists()
        return
    await loading
    assert host.all(ev.CheckpointLoaded) and directory.exists()
    begin, end = host.announced
    assert "checkpoints/step_1 cannot be read, the disk fails ([Errno 5]" in begin
    assert "works again" in end


async def test_a_step_is_probed_once_for_its_version_and_its_checkpoint(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights that it has come to, and not with those of the step before."""
    score, scored = trainer.learner.compute_logprobs, []

    async def counted(sequences: Any) -> Any:
        scored.append(len(sequences))
        return await score(sequences)

    for step in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(trainer.learner, "compute_logprobs", counted)
            await train(trainer, step)
        path = trainer.host.run_dir / "checkpoints" / f"step_{step + 1}" / VERSION_FILE
        probe = mf.decode(path.read_bytes()).probe
        assert probe is not None
        again = await score(probe.sequences)
        assert [list(row) for row in probe.logprobs] == again
    assert scored.count(len(trainer.probe_ids)) == 2


async def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(
    processes: Processes, trainer: Trainer
) -> None:
    await train(trainer, 0)
    await processes.kill()
    model = processes.run_dir / "checkpoints" / "step_1" / "optimizer.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    again = await processes.start("trainer-0")
    host = processes.hosts[-1]
    (ready,) = host.all(ev.TrainerReady)
    again.handle_orders(order(10, load(ready.checkpoints[0])))
    await until(lambda: bool(host.failures))
    assert "step_1 cannot be trained on: its optimizer.safetensors is damaged" in host.failures[0]
    assert (processes.run_dir / "refused" / "step_1").exists()
    await processes.kill()
    await processes.start("trainer-0")
    assert processes.hosts[-1].all(ev.TrainerReady)[0].checkpoints == ()


async def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    processes: Processes, trainer: Trainer
) -> None:
    await train(trainer, 0)
    await processes.kill()
    (processes.run_dir / "checkpoints" / "step_1" / RESUME_FILE).write_text("{")
    await processes.start("trainer-0")
    assert processes.hosts[-1].all(ev.TrainerReady)[0].checkpoints == ()
