"""The processes that a trainer of two ranks really has: they train, one that does not come to a
collective is waited for no longer than that may take, the end of one is told by its name, and one
that outlives its trainer writes nothing beside the next."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from laminar.actors.system.learners import LearnerParts, parts_of
from laminar.actors.system.rank_process import build_rank_command
from laminar.config import load_config
from laminar.config.reading import dump_config
from laminar.run.directory import CONFIG_FILE, RESUME_FILE
from laminar.training.checkpoints import checkpoint
from laminar.training.rank_processes import RankError, RankProcesses
from laminar.training.trainer_state import CheckpointError, ResumeState, encode
from tests.run.conftest import ROOT
from tools.kit.rank_cases import make_samples

pytestmark = pytest.mark.process
FEWER_PASSES = ["tests.training.rank_of_fewer_passes"]
OUTLIVES = ["tests.training.rank_that_outlives"]
FORMER = """
import asyncio, sys
from tests.training.test_rank_process import former
asyncio.run(former(sys.argv[1]))
"""
WAIT_S = 120.0

SETTINGS = (
    "trainer.ranks=2",
    "trainer.micro_batch_tokens=40",
    "algorithm.rollout_correction.mismatch_limit=1e9",  # no engine has sampled these rows
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks here are programs of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@asynccontextmanager
async def trained_by_two(
    run_dir: Path, words: Sequence[str] = (), *settings: str, lock: Path | None = None
) -> AsyncIterator[tuple[LearnerParts, list[str]]]:
    """`words`: that start a rank, in the place of the real ones."""
    config = load_config([str(ROOT / "configs/recipes/words/run.toml")], [*SETTINGS, *settings])
    (run_dir / CONFIG_FILE).write_text(dump_config(config))
    start, lost = [*words, str(run_dir), ""] if words else build_rank_command(run_dir), list[str]()
    gang = RankProcesses(config, start, lock=lock, lost=lost.append, say=lost.append)
    parts = parts_of(config, gang)
    try:
        yield parts, lost
    finally:
        await gang.close()
        if dist.is_initialized():
            dist.destroy_process_group()


async def test_two_ranks_train_until_one_is_gone(tmp_path: Path) -> None:
    """A policy and its critic."""
    ppo = "algorithm.adv_estimator=gae"
    async with trained_by_two(tmp_path, (), ppo) as ((learner, *_), lost):
        await learner.load()
        result = await learner.train_step(make_samples(), 0)
        assert result.changed and result.metrics["critic/skipped_updates"] == 0 and lost == []
        children = psutil.Process().children()
        alive = [p for p in children if p.status() != psutil.STATUS_ZOMBIE]
        (rank,) = (p for p in alive if str(tmp_path) in p.cmdline())
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(
            RankError, match=r"^rank 1 of the trainer has ended \(killed by SIGKILL"
        ):
            await learner.train_step(make_samples(), 1)
        assert lost == ["rank 1 of the trainer has ended (killed by SIGKILL)"]


@pytest.mark.long
async def test_a_rank_of_one_pass_fewer_ends_the_trainer_in_time(tmp_path: Path) -> None:
    fast = "trainer.collective_timeout_s=10"
    async with trained_by_two(tmp_path, FEWER_PASSES, fast) as ((learner, *_), _):
        await learner.load()
        with pytest.raises(RankError, match=r"^rank \d of the trainer failed: "):
            await learner.train_step(make_samples(), 0)


async def written(parts: LearnerParts, directory: Path) -> Path:
    """A whole checkpoint that has not got its name yet."""
    facts = parts.learner.collect_facts()
    resume = ResumeState(version=1, step=1, before="", batches=(), learner=facts)
    partial = await parts.files.create_partial(directory)
    await parts.files.write(partial, await parts.files.copy(), {RESUME_FILE: encode(resume)})
    return partial


async def former(run_dir: str) -> None:
    """The program of a trainer whose rank 1 stands still in its first checkpoint."""
    run = Path(run_dir)
    async with trained_by_two(run, OUTLIVES, lock=run / "trainer.lock") as (parts, _):
        await parts.learner.load()
        await parts.learner.train_step(make_samples(), 0)
        await written(parts, run / "step_1")


async def left_behind(run: Path) -> psutil.Process:
    """Rank 1 of a former trainer, which has been killed; it stands before its rows."""
    rank_0 = subprocess.Popen([sys.executable, "-c", FORMER, str(run)], cwd=ROOT)
    try:
        while True:
            assert rank_0.poll() is None
            for rank in psutil.Process(rank_0.pid).children():
                if rank.status() == psutil.STATUS_STOPPED:
                    return rank
            await asyncio.sleep(0.05)
    finally:
        rank_0.kill()
        rank_0.wait()


async def go_on(rank: psutil.Process) -> None:
    rank.resume()
    deadline = time.monotonic() + WAIT_S
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_rank_that_outlives_its_trainer_writes_before_the_next_begins(
    tmp_path: Path,
) -> None:
    rank, model = await left_behind(tmp_path), tmp_path / ".step_1.partial" / "model.safetensors"
    before, lock = model.read_bytes(), tmp_path / "trainer.lock"
    async with trained_by_two(tmp_path, lock=lock) as (parts, said):
        loading = asyncio.ensure_future(parts.learner.load())
        while not said:
            await asyncio.sleep(0.05)
        assert str(rank.pid) in said[0] and not loading.done()
        await go_on(rank)
        assert model.read_bytes() != before, "it did write"
        await loading
        checkpoint.verify_checkpoint(await written(parts, tmp_path / "step_1"))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_trainer_that_does_not_wait_for_former_ranks_is_seen(tmp_path: Path) -> None:
    """The planted bug: the next trainer has no lock."""
    rank = await left_behind(tmp_path)
    async with trained_by_two(tmp_path) as (parts, _):
        await parts.learner.load()
        partial = await written(parts, tmp_path / "step_1")
        checkpoint.verify_checkpoint(partial)
        await go_on(rank)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            checkpoint.verify_checkpoint(partial)
