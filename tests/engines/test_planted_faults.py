"""A replica of the embedded engine that has other weights than it says is named before a row of it
is trained, and a clean one never is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.engines.torch.engine import TorchEngine
from tests.engines.engine_models import VOCAB, build
from tests.planted_faults import (
    SEEN_BY_PROBE,
    clean_versions,
    found_by,
    weights_on_disk,
    wrong_temperature,
)
from tests.small_run import Replica, SmallRun

DTYPES = ("float32", "bfloat16")
Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a run of two replicas."""
    runs: list[SmallRun] = []

    async def made(dtype: str, *settings: str) -> SmallRun:
        run = SmallRun(
            tmp_path / "model", build("qwen2"), VOCAB, f"weights.dtype={dtype}", *settings
        )
        runs.append(run)
        return await run.start(2)

    yield made
    for run in runs:
        await run.close()


def inside(replica: Replica) -> TorchEngine:
    engine: TorchEngine = replica.engine._engine  # type: ignore[attr-defined]
    return engine


def head_left_as_it_was(run: SmallRun, replica: Replica) -> None:
    """The tied head is a copy of the embedding, made once."""
    weights = inside(replica)._model.weights
    weights.head = weights.embed.clone()


def old_keys_and_values(run: SmallRun, replica: Replica) -> None:
    """What a prompt begins with has the keys and values of the first weights."""
    model, kept = inside(replica)._model, []
    prefill, shared = model.prefill_rows, 32

    def with_old_ones(rows: Any, first: int, chunk: int) -> Iterator[Any]:
        yield from prefill(rows, first, chunk)
        if not run.step:
            kept[:] = [
                part[:, first, :, :shared].clone() for part in (model.cache.k, model.cache.v)
            ]
        for part, old in zip((model.cache.k, model.cache.v), kept, strict=False):
            part[:, first : first + len(rows), :, :shared] = old[:, None]

    model.prefill_rows = with_old_ones  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [*SEEN_BY_PROBE, "head left as it was"])
async def test_wrong_weights_never_serve(start: Start, fault: str, dtype: str) -> None:
    plant = (SEEN_BY_PROBE | {"head left as it was": head_left_as_it_was})[fault]
    # Steps so large that one stale tensor is four times the tolerance in bfloat16 off, on any CPU.
    run = await start(dtype, "optim.lr=1e-1")
    assert await found_by(run, plant) == "probe"


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_wrong_temperature_is_seen_by_the_mismatch(start: Start, dtype: str) -> None:
    run = await start(dtype, "rollout.temperature=0.6")
    assert await found_by(run, wrong_temperature) == "mismatch"


@pytest.mark.parametrize("dtype", DTYPES)
async def test_old_keys_and_values_are_seen_by_the_mismatch(start: Start, dtype: str) -> None:
    run = await start(dtype, "optim.lr=1e-2")
    assert await found_by(run, old_keys_and_values) == "mismatch"


async def test_version_0_comes_from_the_relay_and_no_weights_are_on_disk(
    start: Start, tmp_path: Path
) -> None:
    run = await start("float32")
    assert weights_on_disk(tmp_path) == []
    assert not await run.load(run.replicas[0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
async def test_fifty_clean_versions_raise_no_alarm(start: Start, dtype: str) -> None:
    assert await clean_versions(await start(dtype), 50) == []
