"""Checkpoints are written beside the training, whole or not at all, and say the truth."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from laminar.actors.checkpoint_writer import CheckpointWriter
from laminar.events import events as ev
from laminar.names import ids
from laminar.run.directory import RESUME_FILE
from laminar.training import trainer_state
from laminar.training.checkpoints import export
from laminar.training.checkpoints.file_digests import MODEL_FILE
from laminar.training.learner import Learner
from laminar.training.model.policy import load_policy
from laminar.weights.version import checkpoint
from laminar.weights.version import manifest as mf
from laminar.weights.version.tensors import tensor_view
from tests.actors.parts import PROBE, FakeHost, until
from tools.kit.one_process import make_files, named_weights

MINUTE_NS = 60 * 10**9
MODEL = str(Path(__file__).parents[2] / "configs" / "models" / "spell-0.6m")


async def _probe() -> mf.Probe:
    return PROBE


class Trainer:
    """As much of one as a checkpoint needs."""

    def __init__(self, run_dir: Path, *settings: str) -> None:
        self.host = FakeHost(run_dir, "trainer-0", f"model.name={MODEL}", *settings)
        policy = load_policy(MODEL, "cpu", tokenizer_size=260)
        self.model = policy.model
        learner = Learner(self.host.config, policy)
        shapes = [(name, tuple(t.shape)) for name, t in named_weights(self.model)]
        specs = mf.make_layout(shapes, "bfloat16")
        self.files = make_files(learner, MODEL)
        self.covered: list[int] = []
        self.writer = CheckpointWriter(
            self.host,  # type: ignore[arg-type]
            self.files,
            specs,
            _probe,
            learner.collect_facts,
            self._covered,
        )

    async def _covered(self, step: int) -> None:
        self.covered.append(step)

    async def step(self, step: int) -> None:
        """Every parameter becomes the number of the step."""
        async with self.writer.job_lock:
            self.change(step)
            self.writer.record_batch((f"0.{step}.0", f"0.{step}.1"))
            await self.writer.save_if_due(step, step, 1)

    def change(self, value: float) -> None:
        with torch.no_grad():
            for _, tensor in named_weights(self.model):
                tensor.fill_(value)

    @property
    def saved(self) -> list[ev.CheckpointSaved]:
        return self.host.all(ev.CheckpointSaved)


async def test_weights_of_the_step_are_saved_though_training_goes_on(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "trainer.save_freq=2")
    await trainer.step(1)
    await trainer.step(2)
    trainer.change(99.0)
    await trainer.writer.close()
    assert trainer.saved == [
        ev.CheckpointSaved(version=2, step=2, path="checkpoints/step_2", kept=(2,))
    ]
    directory = tmp_path / "checkpoints" / "step_2"
    found = checkpoint.read_version(directory, 2)
    views = [tensor_view(found.view, spec) for spec in found.manifest.tensors]
    assert {float(tensor.max()) for tensor in views} == {2.0}
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert {float(tensor.min()) for _, tensor in named_weights(loaded)} == {2.0}


async def test_each_copy_is_made_in_the_memory_of_the_one_before(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    places = []
    for value in (1.0, 2.0):
        trainer.change(value)
        await trainer.files.copy()
        trainer.change(99.0)
        copied = trainer.files._worker.plan_files(copied=True)[MODEL_FILE].held
        assert {float(rows.data.max()) for rows in copied.values()} == {value}
        places.append({name: rows.data.data_ptr() for name, rows in copied.items()})
    assert places[0] == places[1]


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2")
    for step in (1, 2, 3):
        await trainer.step(step)
        await trainer.writer.close()
    assert [event.kept for event in trainer.saved] == [(1,), (1, 2), (2, 3)]
    await until(lambda: left(tmp_path) == ["step_2", "step_3"])


async def test_an_old_one_goes_when_the_coordinator_knows_the_new_one(tmp_path: Path) -> None:
    """Until then it is what a restarted trainer would go on from."""
    trainer = Trainer(tmp_path, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    await trainer.step(1)
    await trainer.writer.close()
    trainer.host.durable.clear()
    await trainer.step(2)
    await trainer.writer.close()
    await asyncio.sleep(0.05)
    assert left(tmp_path) == ["step_1", "step_2"] and trainer.saved[-1].kept == (2,)
    trainer.host.durable.set()
    await until(lambda: left(tmp_path) == ["step_2"])


async def test_what_is_reported_later_waits_for_an_acknowledgement_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator hears of step 1 late, and not yet of step 2, for which step 1 would go."""
    trainer = Trainer(tmp_path, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    acknowledgements = [asyncio.Event() for _ in range(3)]
    waited = iter(acknowledgements)
    monkeypatch.setattr(trainer.host, "wait_acknowledged", lambda: next(waited).wait())
    for step in (1, 2):
        await trainer.step(step)
        await trainer.writer.close()
    await until(lambda: len(trainer.saved) == 2)
    acknowledgements[0].set()
    await until(lambda: trainer.covered == [1])
    assert left(tmp_path) == ["step_1", "step_2"]
    acknowledgements[1].set()
    await until(lambda: trainer.covered == [1, 2])
    assert left(tmp_path) == ["step_2"]


async def test_what_was_consumed_is_there_by_id_and_as_a_chain(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "trainer.save_freq=2")
    for step in (1, 2, 3, 4):
        await trainer.step(step)
        await trainer.writer.close()
    first, second = (
        trainer_state.decode((tmp_path / "checkpoints" / f"step_{step}" / RESUME_FILE).read_bytes())
        for step in (2, 4)
    )
    batches = [(f"0.{step}.0", f"0.{step}.1") for step in (1, 2, 3, 4)]
    assert (first.before, [*first.batches, *second.batches]) == ("", batches)
    assert second.before == first.digest != second.digest == ids.extend_chain_digest("", *batches)
    assert ids.extend_chain_digest("", *batches) != ids.extend_chain_digest("", *batches[::-1])


def left(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No model is written before this is set."""
    may, write_all_but_weights = threading.Event(), export.write_all_but_weights

    def slowly(*args: object) -> None:
        assert may.wait(30)
        write_all_but_weights(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(export, "write_all_but_weights", slowly)
    return may


async def test_one_that_falls_due_during_another_follows_it(
    tmp_path: Path, go_on: threading.Event
) -> None:
    """With the newest weights, at once or after the step that is running."""
    trainer = Trainer(tmp_path, "trainer.save_freq=2")
    for step in (2, 3, 4, 5):
        await trainer.step(step)
    assert not trainer.saved
    go_on.set()
    await trainer.host.wait(ev.CheckpointSaved, 2)
    go_on.clear()
    await trainer.step(6)
    await trainer.step(8)
    async with trainer.writer.job_lock:
        go_on.set()
        await trainer.host.wait(ev.CheckpointSaved, 3)
        trainer.change(9)
        trainer.writer.record_batch(("0.9.0", "0.9.1"))
        await trainer.writer.save_if_due(9, 9, 1)
    await trainer.host.wait(ev.CheckpointSaved, 4)
    await trainer.writer.close()
    assert [event.version for event in trainer.saved] == [2, 5, 6, 9]
    directory = tmp_path / "checkpoints" / "step_9"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert {float(tensor.min()) for _, tensor in named_weights(loaded)} == {9.0}
    found = trainer_state.decode((directory / RESUME_FILE).read_bytes())
    steps = (2, 3, 4, 5, 6, 8, 9)
    assert found.digest == ids.extend_chain_digest("", *((f"0.{k}.0", f"0.{k}.1") for k in steps))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [(["trainer.save_minutes=10"], [5, 8, 100]), (["trainer.save_minutes=0"], [100])],
)
async def test_one_is_due_after_minutes_or_steps_whichever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], expected: list[int]
) -> None:
    """Minutes count from the checkpoint before, or from the start."""
    now = 7 * MINUTE_NS
    monkeypatch.setattr(FakeHost, "now_ns", lambda host: now)
    trainer = Trainer(tmp_path, "trainer.save_freq=100", *settings)
    for minute, step in ((9, 4), (10, 5), (19, 6), (19.9, 7), (20, 8), (29, 99), (29, 100)):
        now = (7 + minute) * MINUTE_NS
        await trainer.step(step)
        await trainer.writer.close()
    assert [event.version for event in trainer.saved] == expected


async def test_without_save_freq_no_time_makes_one_due(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "trainer.save_freq=0", "trainer.save_minutes=1e-9")
    await trainer.step(1)
    await trainer.writer.close()
    assert not trainer.saved


async def test_a_disk_that_fails_ends_nothing_and_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    trainer = Trainer(tmp_path, "trainer.save_freq=1")
    with capture_logs() as lines, monkeypatch.context() as patch:
        patch.setattr("laminar.training.shared_safetensors.os.pwrite", full)
        await trainer.step(1)
        await trainer.writer.close()
    assert [line["event"] for line in lines] == ["checkpoint-failed"]
    assert "model.safetensors" in lines[0]["reason"] and "No space left" in lines[0]["reason"]
    await trainer.step(2)
    await trainer.writer.close()
    assert [event.kept for event in trainer.saved] == [(2,)]
    assert not trainer.host.failures


async def test_an_old_checkpoint_that_cannot_be_removed_does_not_hide_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    trainer = Trainer(tmp_path, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    monkeypatch.setattr(trainer.files, "remove", refused)
    for step in (1, 2):
        await trainer.step(step)
        await trainer.writer.close()
    assert [event.kept for event in trainer.saved] == [(1,), (2,)]


async def test_one_that_is_ordered_is_written_between_those_that_are_due(tmp_path: Path) -> None:
    """And the chain of what was trained has all of them, in order."""
    trainer = Trainer(tmp_path, "trainer.save_freq=3")
    for step in (1, 2, 3):
        await trainer.step(step)
        if step > 1:
            await trainer.writer.save(step, step, 1)
        await trainer.writer.close()
    assert [event.version for event in trainer.saved] == [2, 3]
    found = trainer_state.decode((tmp_path / "checkpoints" / "step_3" / RESUME_FILE).read_bytes())
    assert found.digest == ids.extend_chain_digest(
        "", *((f"0.{k}.0", f"0.{k}.1") for k in (1, 2, 3))
    )


async def test_one_that_is_ordered_waits_for_the_one_that_is_being_written(
    tmp_path: Path, go_on: threading.Event
) -> None:
    """Which may be the one that is ordered."""
    trainer = Trainer(tmp_path, "trainer.save_freq=1")
    await trainer.step(1)
    ordered = asyncio.ensure_future(trainer.writer.save(1, 1, 1))
    await asyncio.sleep(0.05)
    assert not ordered.done()
    go_on.set()
    await ordered
    await trainer.writer.close()
    assert [event.version for event in trainer.saved] == [1]


async def test_one_that_is_ordered_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(28, "No space left on device")]
    write_all_but_weights = export.write_all_but_weights

    def once_full(*args: object) -> None:
        if errors:
            raise errors.pop()
        write_all_but_weights(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(export, "write_all_but_weights", once_full)
    trainer = Trainer(tmp_path, "trainer.save_freq=9")
    await trainer.step(1)
    await trainer.writer.save(1, 1, 1)
    await trainer.writer.close()
    assert [event.version for event in trainer.saved] == [1] and not errors
    errors.append(OSError(27, "File too large"))
    await trainer.step(2)
    await trainer.writer.save(2, 2, 1)
    await trainer.writer.close()
    await until(lambda: bool(trainer.host.failures))
    assert [event.version for event in trainer.saved] == [1]
