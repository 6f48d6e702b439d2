"""Training goes on from a checkpoint as if nothing had happened, bit for bit, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128_hexdigest

from laminar.config import ConfigError
from laminar.run.work_counter import get_work_count
from laminar.training import distributed_learner, trainer_state
from laminar.training.checkpoints import checkpoint
from laminar.training.checkpoints.checkpoint import iter_moments
from laminar.training.learner import Learner
from laminar.training.model.policy import LoadedPolicy, load_policy
from laminar.training.trainer_state import CheckpointError, ResumeState
from tests.training.saved_checkpoint import load_checkpoint, saved

Make = Callable[..., Any]
SETTINGS = {
    "optim.lr": 0.01,
    "optim.weight_decay": 0.1,
    "optim.clip_grad": 1.0,
    "optim.lr_warmup_steps": 3,
}
WITH_KL = {**SETTINGS, "algorithm.use_kl_loss": True}


class Run:
    """A learner that trains one batch per step, and what it saved."""

    def __init__(self, source: Path, config: Any, make_samples: Make) -> None:
        self.source, self.config, self.make_samples = source, config, make_samples
        self.learner = self.fresh(source)

    def fresh(self, source: Path) -> Learner:
        def policy() -> LoadedPolicy:
            return load_policy(str(source), "cpu", tokenizer_size=48)

        reference = policy() if self.config.algorithm.use_kl_loss else None
        return Learner(self.config, policy(), reference=reference)

    def train(self, *steps: int) -> list[Any]:
        """All rows are of the version before."""
        return [self._train(step) for step in steps]

    def _train(self, step: int) -> Any:
        made = max(step - 1, 0)
        samples = self.make_samples(seed=step, source=("rollout-0", made, made))
        return self.learner.train_step(samples, step)

    async def save(self, directory: Path) -> Path:
        return await saved(self.learner, self.source, directory)

    def content(self) -> dict[str, bytes]:
        """Parameters and moments, byte by byte."""
        model = self.learner.policy.model
        found = dict(model.named_parameters()) | dict(iter_moments(model, self.learner.optimizer))
        return {name: tensor.detach().numpy().tobytes() for name, tensor in found.items()}


@pytest.fixture
def run(model_directory: Make, make_config: Make, make_samples: Make) -> Callable[..., Run]:
    def build(settings: dict[str, Any] = SETTINGS, **fields: Any) -> Run:
        source = model_directory(vocab_size=48, **fields)
        config = make_config({**settings, "model.name": str(source)})
        return Run(source, config, make_samples)

    return build


@pytest.mark.parametrize("tied", [True, False])
async def test_two_more_steps_give_the_same_weights_and_moments(
    tied: bool, tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run(WITH_KL, tied=tied)
    trained.train(0, 1)
    directory = await trained.save(tmp_path / "step_2")
    expected = trained.train(2, 3)
    content = trained.content()
    assert any(name.startswith("exp_avg_sq.") for name in content)

    trained.learner = trained.fresh(trained.source)
    assert trained.content() != content
    found = load_checkpoint(directory, trained.learner)
    assert (found.version, found.step, found.batches) == (2, 2, (("0.0.0",),))
    assert found.learner.torch == torch.__version__ and found.learner.threads == 1
    assert [r.metrics for r in trained.train(2, 3)] == [r.metrics for r in expected]
    assert trained.content() == content


async def test_what_an_engine_may_differ_by_is_known_as_before(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    """The rows of a suspect are left out again: how far past steps moved is in the checkpoint."""
    trained = run({**SETTINGS, "algorithm.rollout_correction.mismatch_limit": 0.5})
    trained.train(0, 1)
    directory = await trained.save(tmp_path / "step_2")
    (expected,) = trained.train(2)
    assert expected.left_out
    trained.learner = trained.fresh(trained.source)
    load_checkpoint(directory, trained.learner)
    (again,) = trained.train(2)
    assert again.left_out == expected.left_out


async def test_a_checkpoint_before_any_update_has_no_moments(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run()
    directory = await trained.save(tmp_path / "step_2")
    trained.train(0)
    load_checkpoint(directory, trained.learner)
    fresh = trained.content()
    assert not any(name.startswith("exp_avg") for name in fresh)


async def test_a_checkpoint_without_the_size_of_a_chunk_is_loaded(
    tmp_path: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = run()
    trained.train(0)
    whole = trainer_state.encode

    def without(found: ResumeState) -> bytes:
        text = whole(found)
        assert b'"logit_chunk_tokens":1024,' in text
        return text.replace(b'"logit_chunk_tokens":1024,', b"")

    monkeypatch.setattr(trainer_state, "encode", without)
    directory = await trained.save(tmp_path / "step_2")
    trained.learner = trained.fresh(trained.source)
    assert load_checkpoint(directory, trained.learner).learner.logit_chunk_tokens == 0


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
async def test_one_flipped_bit_is_refused(
    name: str, tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run()
    trained.train(0)
    directory = await trained.save(tmp_path / "step_2")
    flip_bit(directory / name)
    with pytest.raises(CheckpointError, match=rf"step_2 .*{name} is damaged"):
        load_checkpoint(directory, trained.learner)


async def test_bytes_of_a_checkpoint_are_counted_as_work(
    tmp_path: Path, run: Callable[..., Run]
) -> None:
    trained = run()
    counted = get_work_count()
    directory = await trained.save(tmp_path / "step_2")
    written = get_work_count()
    load_checkpoint(directory, trained.learner)
    tensors = len(list(trained.learner.policy.model.parameters()))
    assert written >= counted + tensors and get_work_count() >= written + tensors


async def test_what_changes_before_it_is_digested_is_refused(
    tmp_path: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are of what was written, not of what a disk gives back; else they are as they were
    when each file was read."""
    trained = run()
    trained.train(0)
    sound = await trained.save(tmp_path / "step_2")
    digests = json.loads((sound / "digests.json").read_bytes())
    assert digests == {name: xxh3_128_hexdigest((sound / name).read_bytes()) for name in digests}
    write_rows = distributed_learner.write_rows

    def damaged(path: Path, *args: Any) -> Any:
        written = write_rows(path, *args)
        flip_bit(path)
        return written

    monkeypatch.setattr(distributed_learner, "write_rows", damaged)
    directory = await trained.save(tmp_path / "step_3")
    with pytest.raises(CheckpointError, match=r"step_3 .*model\.safetensors is damaged"):
        load_checkpoint(directory, trained.learner)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "digests.json"])
async def test_a_missing_file_is_named(name: str, tmp_path: Path, run: Callable[..., Run]) -> None:
    trained = run()
    directory = await trained.save(tmp_path / "step_2")
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(directory, trained.learner)


@pytest.mark.parametrize(
    ("settings", "other", "found"),
    [
        (WITH_KL, {}, "compares with a reference of digest"),
        (SETTINGS, {"intermediate_size": 32}, r"to another model: .* is F32 \(64, 32\)"),
    ],
    ids=["reference", "policy"],
)
async def test_another_model_is_refused(
    settings: dict[str, Any],
    other: dict[str, int],
    found: str,
    tmp_path: Path,
    run: Callable[..., Run],
    make_model: Make,
) -> None:
    trained = run(settings)
    directory = await trained.save(tmp_path / "step_2")
    make_model(7, **other).save_pretrained(trained.source)
    with pytest.raises(ConfigError, match=found):
        load_checkpoint(directory, trained.fresh(trained.source))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
async def test_elements_of_another_type_are_refused(
    name: str, tmp_path: Path, run: Callable[..., Run]
) -> None:
    """They would be rounded without a word."""
    trained = run()
    trained.train(0)
    directory = await trained.save(tmp_path / "step_2")
    short = {key: tensor.bfloat16() for key, tensor in load_file(directory / name).items()}
    save_file(short, directory / name)
    with pytest.raises(ConfigError, match=rf"its {name} belongs to another .* is BF16 .* not F32"):
        checkpoint.restore_checkpoint(directory, trained.learner)
