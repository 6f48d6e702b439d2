"""What can be wrong with a replica's weights, planted; and what finds it.

Reads   a SmallRun of two replicas, of which the second gets the fault
Gives   FAULTS by name, `found_by`: how that fault was found, before a row of it was trained
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from laminar.engines.protocol import GenerateRequest, WeightSource
from laminar.training.steps import TrainSample
from tests.small_run import Replica, SmallRun

STALE = "model.layers.1.mlp.down_proj.weight"
VERSIONS = 4  #: that are trained before the fault has to be found
Plant = Callable[[SmallRun, Replica], None]


def stale_tensor(run: SmallRun, replica: Replica) -> None:
    """Loads leave one tensor as it is: a source whose bytes are new but for that one."""
    load, first = replica.engine.load, run.sources[0]

    def partly(source: WeightSource) -> Awaitable[None]:
        data, old = bytearray(Path(source.path).read_bytes()), Path(first.path).read_bytes()
        places = sorted((t.offset, t.name) for t in source.tensors)
        ends = [offset for offset, _ in places[1:]] + [source.nbytes]
        for (start, name), end in zip(places, ends, strict=True):
            if name == STALE:
                data[start:end] = old[start:end]
        path = run.directory / "partly"
        path.write_bytes(data)
        return load(dataclasses.replace(source, path=str(path)))

    replica.engine.load = partly  # type: ignore[method-assign, assignment]


def skipped_load(run: SmallRun, replica: Replica) -> None:
    async def nothing(source: WeightSource) -> None:
        pass

    replica.engine.load = nothing  # type: ignore[method-assign, assignment]


def joiner_on_base(run: SmallRun, replica: Replica) -> None:
    """It loads what it began with."""
    load = replica.engine.load
    replica.engine.load = lambda source: load(run.sources[0])  # type: ignore[method-assign]


def wrong_temperature(run: SmallRun, replica: Replica) -> None:
    """Requests lose theirs on the way."""
    add = replica.engine.add

    def lost(request: GenerateRequest) -> Any:
        return add(dataclasses.replace(request, temperature=1.0))

    replica.engine.add = lost  # type: ignore[method-assign]


SEEN_BY_PROBE: dict[str, Plant] = {
    "stale tensor": stale_tensor,
    "skipped load": skipped_load,
    "joiner on base weights": joiner_on_base,
}


async def found_by(run: SmallRun, plant: Plant | None) -> str:
    """Four versions of clean training by the first replica; the second gets the fault with its
    first load, and serves when the probe passes. "probe", "mismatch" or "nothing"."""
    healthy, sick = run.replicas
    assert not await run.load(sick)
    if plant is not None:
        plant(run, sick)
    await run.sample(sick)
    for _ in range(VERSIONS):
        assert not await run.load(healthy)
        assert not run.train(await run.sample(healthy)).suspects
    assert not await run.load(healthy)
    if failure := await run.load(sick):
        assert "log-probs of the probe differ" in failure
        return "probe"
    rows = [*await run.sample(healthy), *await run.sample(sick)]
    result = run.train(rows)
    assert set(result.suspects) <= {("rollout-1", VERSIONS)}
    assert result.changed, "the rows of the healthy one are trained"
    if not result.suspects:
        return "nothing"
    assert set(result.left_out) == {r.sample_id for r in rows if r.spans[0].replica == "rollout-1"}
    return "mismatch"


def weights_on_disk(directory: Path) -> list[Path]:
    """Model files, which a replica could read instead of what a relay holds."""
    return [path for kind in ("safetensors", "bin", "pt") for path in directory.rglob(f"*.{kind}")]


async def clean_versions(run: SmallRun, count: int) -> list[str]:
    """What was said against any; rows are up to two versions old, as in the quickstart."""
    said: list[str | None] = []

    async def rows() -> list[TrainSample]:
        found = []
        for replica in run.replicas:
            said.append(await run.load(replica))
            found += await run.sample(replica, 2)
        return found

    batches = [await rows() for _ in range(2)]
    for _ in range(count):
        batches.append(await rows())
        said += map(str, run.train(batches.pop(0)).suspects.items())
    return [line for line in said if line]
