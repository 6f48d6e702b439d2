"""What several ranks publish and save is, byte for byte, what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laminar.actors.trainer import NO_PROBE
from laminar.run.directory import RESUME_FILE
from laminar.training import checkpoint
from laminar.training.learner import Learner
from laminar.training.model import load_policy, named_weights
from laminar.training.resume import Resume, decode, encode
from laminar.training.threaded import ThreadedFiles
from laminar.weights.version import manifest as mf
from laminar.weights.version.checkpoint import describe
from laminar.weights.version.hashes import manifest_of
from laminar.weights.version.tensors import write_tensors
from tests.kit import rank_cases
from tests.kit.rank_cases import PROBE, VOCAB, make_config, make_samples
from tests.kit.rank_group import RankGroup

FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "generation_config.json")
SETTINGS = {"optim.lr": 0.01, "optim.weight_decay": 0.1, "optim.clip_grad": 1.0}


class OneProcess:
    """A learner that is not sharded, and what it saves."""

    def __init__(self, source: Path, settings: dict[str, Any]) -> None:
        self.source, self.config = source, make_config(settings)
        policy = load_policy(str(source), "cpu", tokenizer_size=VOCAB)
        self.learner = Learner(self.config, policy)
        shapes = [(name, tuple(t.shape)) for name, t in self.weights()]
        self.specs = mf.layout(shapes, "float32")

    def weights(self) -> Any:
        return named_weights(self.learner.policy.model)

    def version(self) -> bytes:
        view = np.empty(mf.check_tensors(self.specs), dtype=np.uint8)
        write_tensors(view, self.specs, self.weights())
        return view.tobytes()

    def digest(self) -> str:
        facts = {"version": 2, "step": 1, "specs": self.specs, "probe": NO_PROBE}
        return describe(tensors=self.weights(), **facts).digest

    async def save(self, directory: Path) -> Path:
        files = ThreadedFiles(lambda: self.learner, str(self.source), describe)
        facts = self.learner.facts()
        found = Resume(version=2, step=1, before="", batches=(), learner=facts)
        directory.mkdir()
        await files.write(directory, await files.copy(), {RESUME_FILE: encode(found)})
        return directory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rank_cases.make_model(3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings_of(source: Path) -> dict[str, Any]:
    return {**SETTINGS, "model.name": str(source)}


def run(ranks: RankGroup, size: int, script: str, *args: Any, **options: Any) -> Any:
    """What rank 0 says."""
    return ranks.call(size, "on_ranks", script, *args, **options)[0]


def flat(scores: list[list[float]]) -> list[float]:
    return [score for row in scores for score in row]


@pytest.mark.parametrize("offload", ["none", "all"])
def test_ranks_load_score_train_and_publish_as_one_process(
    offload: str, source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    settings = settings_of(source)
    one, samples = OneProcess(source, settings), make_samples()
    before = one.learner.score(PROBE)
    expected = one.learner.train_step(samples, 3)
    for size in (1, 3):
        slot = tmp_path / "slot"
        result, *scores, digest = run(
            ranks,
            size,
            "publish",
            settings | {"trainer.offload": offload},
            str(slot),
            samples,
        )
        assert flat(scores[0]) == pytest.approx(flat(before), abs=1e-5)
        assert flat(scores[1]) == pytest.approx(flat(one.learner.score(PROBE)), abs=1e-3)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
        published = np.frombuffer(slot.read_bytes(), np.float32)
        assert published == pytest.approx(np.frombuffer(one.version(), np.float32), abs=1e-3)
        view = np.fromfile(slot, dtype=np.uint8)
        facts = {"version": 2, "step": 1, "tensors": one.specs, "probe": NO_PROBE}
        assert digest == manifest_of(view, **facts).digest


async def test_a_checkpoint_has_the_same_bytes_from_any_number_of_ranks(
    source: Path, tmp_path: Path, ranks: RankGroup
) -> None:
    settings = settings_of(source)
    one = OneProcess(source, settings)
    one.learner.train_step(make_samples(), 3)
    saved = await one.save(tmp_path / "one")
    for size in (1, 2, 3, 4):
        target = tmp_path / f"by {size}"
        digest = run(ranks, size, "save_again", settings, str(saved), str(target))
        assert digest == one.digest()
        for name in FILES:
            assert (target / name).read_bytes() == (saved / name).read_bytes(), (size, name)
        assert decode((target / RESUME_FILE).read_bytes()).learner.ranks == size
    checkpoint.load(target, one.learner)


def test_an_export_is_read_back(source: Path, tmp_path: Path, ranks: RankGroup) -> None:
    scores = run(ranks, 2, "export", settings_of(source), str(tmp_path / "export"))
    policy = load_policy(str(tmp_path / "export"), "cpu", tokenizer_size=VOCAB)
    again = Learner(make_config({}), policy)
    assert flat(scores) == pytest.approx(flat(again.score(PROBE)), abs=1e-5)
