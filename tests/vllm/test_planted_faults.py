"""A vLLM replica that has other weights than it says is named before a row of it is trained, and a
clean one never is. In `make test-vllm`, not in CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar.engines.vllm import worker
from tests.planted_faults import (
    SEEN_BY_PROBE,
    Plant,
    clean_versions,
    found_by,
    weights_on_disk,
    wrong_temperature,
)
from tests.small_run import Replica, SmallRun
from tests.vllm.replica import LIMIT, model_of

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def old_keys_and_values(run: SmallRun, replica: Replica) -> None:
    """The prefix cache outlives a load."""
    llm: Any = replica.engine._llm  # type: ignore[attr-defined]
    pause = llm.pause_generation

    async def kept() -> bool:
        return True

    llm.reset_prefix_cache = kept
    llm.pause_generation = lambda mode, clear_cache: pause(mode=mode, clear_cache=False)


def healed(replica: Replica) -> None:
    """What a plant has put into an engine is taken out of it."""
    llm: Any = replica.engine._llm  # type: ignore[attr-defined]
    for part in (replica.engine, llm):
        for name in ("load", "add", "reset_prefix_cache", "pause_generation"):
            vars(part).pop(name, None)


SHALLOW = "algorithm.rollout_correction.mismatch_limit=0.02"
"""Two layers round less than the default limit for bfloat16 allows for: clean rows are at 0.014,
those with old keys and values at 0.16 and more (no two runs of vLLM sample the same; at a larger
learning rate some of them end with a model of one token, which any cache gives back)."""
FAR = "optim.lr=6e-2"
"""In bfloat16 one stale tensor is 0.43 to 2.0 from the right weights in the mean of the probe,
which allows for 0.25; at half of this rate once in a while less."""
PLANTS: dict[str, tuple[Plant | None, str, str]] = {
    **{name: (plant, "probe", FAR) for name, plant in SEEN_BY_PROBE.items()},
    "wrong temperature": (wrong_temperature, "mismatch", "rollout.temperature=0.6"),
    "old keys and values": (old_keys_and_values, "mismatch", f"optim.lr=5e-3 {SHALLOW}"),
    "nothing": (None, "nothing", "optim.lr=3e-2"),
}


def small(directory: Path, dtype: str, *settings: str) -> SmallRun:
    shared = (f"weights.dtype={dtype}", "rollout.engine=vllm", "trainer.device=cpu")
    return SmallRun(directory, model_of(1), LIMIT, *shared, *settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_fifty_clean_versions_and_every_planted_fault(tmp_path: Path, dtype: str) -> None:
    run = await small(tmp_path / "clean", dtype).start(2)
    assert weights_on_disk(tmp_path) == []
    assert await clean_versions(run, 50) == []
    found = {}
    for name, (plant, _, setting) in PLANTS.items():
        planted = small(tmp_path / name, dtype, *setting.split()).take_over(run)
        found[name] = await found_by(planted, plant)
        healed(run.replicas[1])
    assert found == {name: how for name, (_, how, _) in PLANTS.items()}
    await run.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_tied_head_that_is_left_packed_never_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The core is forked from this process, and has what is planted here. Its head is that of the
    random weights which it started with."""
    monkeypatch.setattr(worker, "_pack_head_again", lambda model: None)
    run = await small(tmp_path / "model", dtype).start(1)
    assert "log-probs of the probe differ" in await run.load(run.replicas[0])
    await run.close()
