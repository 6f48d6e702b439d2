"""What several ranks publish and save is, byte for byte, what one process does."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from laminar.actors.trainer import NO_PROBE
from laminar.run.directory import RESUME_FILE
from laminar.training.checkpoints import checkpoint
from laminar.training.checkpoints.file_digests import (
    CRITIC_MODEL_FILE,
    CRITIC_OPTIMIZER_FILE,
    write_digests,
)
from laminar.training.distributed_learner import TrainOrder, _decoder, _encoder
from laminar.training.learner import Learner
from laminar.training.model.lora_targets import ADAPTER_FILE
from laminar.training.model.policy import load_critic, load_policy
from laminar.training.ranks import RankLayout
from laminar.training.steps import TrainSample
from laminar.training.trainer_state import CheckpointError, ResumeState, encode
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import build_manifest
from laminar.weights.version.tensors import write_tensors
from tests.training.saved_checkpoint import load_checkpoint
from tools.kit import rank_cases
from tools.kit.extras import needs_peft
from tools.kit.one_process import build_tensor_manifest, make_files, named_weights
from tools.kit.rank_cases import PROBE, VOCAB, make_config, make_samples
from tools.kit.rank_group import RankGroup

FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "generation_config.json")
CRITIC_FILES = (CRITIC_MODEL_FILE, CRITIC_OPTIMIZER_FILE)
HSDP, FULL = RankLayout(2, 2, "node"), RankLayout(2, 2, "all")
Size = int | RankLayout
PPO = {"algorithm.adv_estimator": "gae", "critic.lr": 0.01}
SETTINGS = {"optim.lr": 0.01, "optim.weight_decay": 0.1, "optim.clip_grad": 1.0}


class OneProcess:
    """A learner that is not sharded, and what it saves."""

    def __init__(self, source: Path, settings: dict[str, Any], *, double: bool = False) -> None:
        self.source, self.config = source, make_config(settings)
        adapt = self.config if self.config.lora.rank else None
        policy = load_policy(str(source), "cpu", tokenizer_size=VOCAB, adapt=adapt)
        critic = None
        if self.config.has_critic:
            critic = load_critic(str(source), "cpu", tokenizer_size=VOCAB)
        for each in (policy, critic) if double else ():
            each.model.double()
        self.learner = Learner(self.config, policy, critic=critic)
        shapes = [(name, tuple(t.shape)) for name, t in self.weights()]
        self.specs = mf.make_layout(shapes, "float32")

    def train(self, *steps: int) -> None:
        """The first gradient of a critic is its head's alone."""
        for step in steps:
            self.learner.train_step(make_samples(), step)

    def weights(self) -> Any:
        return named_weights(self.learner.policy.model)

    def version(self) -> bytes:
        view = np.empty(mf.check_tensors(self.specs), dtype=np.uint8)
        write_tensors(view, self.specs, self.weights())
        return view.tobytes()

    def digest(self) -> str:
        facts = {"version": 2, "step": 1, "specs": self.specs, "probe": NO_PROBE}
        return build_tensor_manifest(tensors=self.weights(), **facts).digest

    async def save(self, directory: Path) -> Path:
        files = make_files(self.learner, str(self.source))
        facts = self.learner.collect_facts()
        found = ResumeState(version=2, step=1, before="", batches=(), learner=facts)
        directory.mkdir()
        await files.write(directory, await files.copy(), {RESUME_FILE: encode(found)})
        return directory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rank_cases.make_model(3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings_of(source: Path) -> dict[str, Any]:
    return {**SETTINGS, "model.name": str(source)}


def run(ranks: RankGroup, size: Size, script: str, *args: Any, **options: Any) -> Any:
    """What rank 0 says."""
    return ranks.call(size, "on_ranks", script, *args, **options)[0]


def flat(scores: list[list[float]]) -> list[float]:
    return [score for row in scores for score in row]


@pytest.mark.parametrize(
    ("offload", "size", "more"),
    [("none", 3, PPO), ("all", 1, {}), ("none", HSDP, {}), ("none", FULL, {}), ("all", FULL, {})],
)
def test_ranks_load_score_train_and_publish_as_one_process(
    offload: str, size: Size, more: dict[str, Any], source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    """A critic is not among what is published."""
    settings = settings_of(source) | more
    one, samples = OneProcess(source, settings), make_samples()
    before = one.learner.compute_logprobs(PROBE)
    expected = one.learner.train_step(samples, 3)
    slot = tmp_path / "slot"
    args = (settings | {"trainer.offload": offload}, str(slot), samples)
    _, *again = run(ranks, size, "publish", *args)
    content = slot.read_bytes()
    result, *scores, digest = run(ranks, size, "publish", *args)
    assert (slot.read_bytes(), *scores, digest) == (content, *again), "a repeated step differs"
    assert flat(scores[0]) == pytest.approx(flat(before), abs=1e-5)
    assert flat(scores[1]) == pytest.approx(flat(one.learner.compute_logprobs(PROBE)), abs=1e-3)
    memory = {name for name in result.metrics if name.endswith("_gb")}
    assert memory == {"perf/max_resident_gb", "perf/estimated_memory_gb"}
    metrics = {name: result.metrics[name] for name in result.metrics.keys() - memory}
    assert metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
    published = np.frombuffer(slot.read_bytes(), np.float32)
    assert published == pytest.approx(np.frombuffer(one.version(), np.float32), abs=1e-3)
    view = np.fromfile(slot, dtype=np.uint8)
    facts = {"version": 2, "step": 1, "tensors": one.specs, "probe": NO_PROBE}
    assert digest == build_manifest(view, **facts).digest


async def test_a_checkpoint_has_the_same_bytes_from_any_number_of_ranks(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    settings = settings_of(source) | PPO
    one = OneProcess(source, settings)
    one.train(2, 3)
    saved = await one.save(tmp_path / "one")
    for size in (1, 2, 3, 4, HSDP, FULL):
        target = tmp_path / f"by {size}"
        digest = run(ranks, size, "save_again", settings, str(saved), str(target))
        assert digest == one.digest()
        assert files_of(target) == files_of(saved)
        check_damage_is_seen(target)
    load_checkpoint(target, one.learner)
    write_digests(target)  # of each file as a whole, as earlier checkpoints have them
    checkpoint.verify_checkpoint(target)


def check_damage_is_seen(directory: Path) -> None:
    """Wherever in a file, whichever rank wrote it; each file ends with its last span."""
    path = directory / "optimizer.safetensors"
    content = path.read_bytes()
    places = (4, 200, len(content) // 2, len(content) * 3 // 4)
    changed = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    for damaged in (*changed, content[:-4], content + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is damaged"):
            checkpoint.verify_checkpoint(directory)
    path.write_bytes(content)
    checkpoint.verify_checkpoint(directory)


def files_of(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES + CRITIC_FILES}


@needs_peft
async def test_ranks_publish_save_and_export_adapters_as_one_process(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    settings = settings_of(source) | {"lora.rank": 3, "algorithm.use_kl_loss": True}
    one = OneProcess(source, settings | {"algorithm.use_kl_loss": False})
    begun = one.digest()
    one.learner.train_step(make_samples(), 3)
    saved = await one.save(tmp_path / "one")
    for size in (2, 3, HSDP, FULL):
        target = tmp_path / f"by {size}"
        run(ranks, size, "save_again", settings, str(saved), str(target))
        for name in ("optimizer.safetensors", ADAPTER_FILE):
            assert (target / name).read_bytes() == (saved / name).read_bytes()
        assert apart(saved, target) <= 1e-6
        load_checkpoint(target, one.learner)
    exported = tmp_path / "export"
    run(ranks, 2, "export", settings, str(exported))
    same = OneProcess(exported, settings_of(exported))
    assert same.digest() == begun == OneProcess(source, settings_of(source)).digest()
    assert (exported / ADAPTER_FILE).is_file()


async def test_training_goes_on_with_other_ranks(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    """From one checkpoint, by 2, 1 and 3 ranks and by two nodes in turn, in float64."""
    settings, samples = settings_of(source) | PPO, make_samples(seed=1)
    with rank_cases.in_double():
        one = OneProcess(source, settings, double=True)
        one.train(2, 3)
        saved = before = await one.save(tmp_path / "one")
        expected = one.learner.train_step(samples, 4)
        after = await one.save(tmp_path / "one and a step")
    for turn, size in enumerate((2, 1, FULL, 3, HSDP)):
        target = tmp_path / f"turn {turn}"
        args = (settings, str(before), str(target), samples)
        _, result = run(ranks, size, "go_on", *args, double=True)
        assert files_of(target) == files_of(saved)
        norms = [u.grad_norm for u in expected.updates]
        assert [u.grad_norm for u in result.updates] == pytest.approx(norms, rel=1e-12)
        assert apart(after, Path(f"{target} and a step")) <= 1e-9
        before = target
    planted: tuple[tuple[str, Size], ...] = (("not resharded", 2), ("rows not shared", HSDP))
    for bug, size in planted:
        args = (settings, str(saved), str(tmp_path / bug), samples)
        run(ranks, size, "go_on", *args, double=True, planted=bug)
        assert apart(after, tmp_path / f"{bug} and a step") > 1e-3


def apart(one: Path, other: Path) -> float:
    """Largest distance of a tensor of two checkpoints, relative to its largest element."""
    found = []
    for path in one.rglob("*.safetensors"):
        tensors, others = load_file(path), load_file(other / path.relative_to(one))
        assert tensors.keys() == others.keys()
        found += [
            (t - others[key]).abs().max() / t.abs().max().clamp(min=1e-30)
            for key, t in tensors.items()
        ]
    return float(max(found))


async def test_bugs_of_what_is_saved_and_published_are_seen(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    settings = settings_of(source) | PPO
    one = OneProcess(source, settings)
    one.train(2, 3)
    saved = await one.save(tmp_path / "one")

    def differs(planted: str, size: Size = 2) -> set[str]:
        """What of a checkpoint, and whether its digest, is not as it was."""
        target = tmp_path / f"by {planted}"
        args = (settings, str(saved), str(target))
        digest = run(ranks, size, "save_again", *args, planted=planted)
        found, expected = files_of(target), files_of(saved)
        names = {name for name in expected if found[name] != expected[name]}
        try:
            checkpoint.verify_checkpoint(target)
        except CheckpointError:
            names.add("damaged")
        return names | ({"digest"} if digest != one.digest() else set())

    assert differs("") == set()
    both = {"model.safetensors", "digest"}
    assert differs("tied by address") == both
    elsewhere = {*both, "optimizer.safetensors", *CRITIC_FILES, "damaged"}
    assert differs("rows elsewhere") == elsewhere
    assert differs("others write late") == {"digest", "damaged"}
    assert differs("rows of the first node", FULL) == elsewhere


def test_ranks_of_all_nodes_continue_after_a_full_disk(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    """Those that have sent rows for a file that was not written take the next order."""
    failed = ranks.call(FULL, "write_twice", settings_of(source), tmp_path)
    assert failed == [[True, False], *[[False, False]] * 3]
    found, expected = load_file(tmp_path / FILES[0]), load_file(source / FILES[0])
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_buffers_that_are_in_no_file_are_made(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    args = ("export", settings_of(source), str(tmp_path / "export"))
    expected = flat(OneProcess(source, settings_of(source)).learner.compute_logprobs(PROBE))
    assert flat(run(ranks, 2, *args)) == pytest.approx(expected, abs=1e-5)
    shutil.rmtree(tmp_path / "export")
    wrong = flat(run(ranks, 2, *args, planted="buffers as they are"))
    assert wrong != pytest.approx(expected, abs=1e-2)


def test_a_rank_is_sent_all_of_a_sample() -> None:
    sample = replace(make_samples()[0], turns=(4, 5), contexts=(np.array([7], np.int32),))
    order = TrainOrder((replace(sample, parents=(-1, 0)),), 3)
    again = _decoder.decode(_encoder.encode(order))
    assert isinstance(again, TrainOrder) and again.step == 3
    for field in fields(TrainSample):
        expected = getattr(order.batch[0], field.name)
        np.testing.assert_array_equal(getattr(again.batch[0], field.name), expected)
