"""The processes that a trainer of two ranks really has: they train, one that does not come to a
collective is waited for no longer than that may take, and the end of one is told by its name."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from laminar.actors.system.learners import parts_of
from laminar.actors.system.rank_process import program
from laminar.actors.trainer import Learner
from laminar.config import load
from laminar.config.reading import dumps
from laminar.run.directory import CONFIG_FILE
from laminar.training.gang import Gang, RankError
from tests.kit.rank_cases import make_samples
from tests.run.conftest import ROOT

pytestmark = pytest.mark.process
FEWER_PASSES = [sys.executable, "-m", "tests.training.rank_of_fewer_passes"]

SETTINGS = (
    "trainer.ranks=2",
    "trainer.micro_batch_tokens=40",
    "algorithm.rollout_correction.mismatch_limit=1e9",  # no engine has sampled these rows
)


@asynccontextmanager
async def trained_by_two(
    run_dir: Path, words: Sequence[str] = (), *settings: str
) -> AsyncIterator[tuple[Learner, list[str]]]:
    """`words`: that start a rank, in the place of the real ones."""
    config = load(
        [str(ROOT / "configs/quickstart.toml")],
        [*SETTINGS, *settings],
    )
    (run_dir / CONFIG_FILE).write_text(dumps(config))
    start, lost = [*words, str(run_dir), ""] if words else program(run_dir), list[str]()
    gang = Gang(config, start, lock=None, lost=lost.append, say=lost.append)
    learner = parts_of(config, gang).learner
    try:
        await learner.load()
        yield learner, lost
    finally:
        await gang.close()
        dist.destroy_process_group()


async def test_two_ranks_train_until_one_is_gone(tmp_path: Path) -> None:
    async with trained_by_two(tmp_path) as (learner, lost):
        result = await learner.train_step(make_samples(), 0)
        assert result.changed and lost == []
        (rank,) = (p for p in psutil.Process().children() if str(tmp_path) in p.cmdline())
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(
            RankError, match=r"^rank 1 of the trainer has ended \(killed by SIGKILL"
        ):
            await learner.train_step(make_samples(), 1)
        assert lost == ["rank 1 of the trainer has ended (killed by SIGKILL)"]


@pytest.mark.long
async def test_a_rank_of_one_pass_fewer_ends_the_trainer_in_time(tmp_path: Path) -> None:
    fast = "trainer.collective_timeout_s=10"
    async with trained_by_two(tmp_path, FEWER_PASSES, fast) as (learner, _):
        with pytest.raises(RankError, match=r"^rank \d of the trainer failed: "):
            await learner.train_step(make_samples(), 0)
