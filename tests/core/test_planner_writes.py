"""A stage of the planner writes the records that it names, and no other."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import msgspec
import pytest

from laminar.core.context import Context
from laminar.core.planner import WRITES
from laminar.core.state.state import State
from tools.kit.random_worlds import environment_world, in_flight_world, random_world

RECORDS = set(State.__struct_fields__) - {"logic", "time_ns", "seq"}


def encode_others(state: State, writes: str) -> bytes:
    """The encoding of every record that a stage does not name."""
    others = RECORDS - set(writes.split())
    return msgspec.msgpack.encode({name: getattr(state, name) for name in sorted(others)})


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the stages that have run, each with the other records frozen."""
    names: set[str] = set()

    def freeze(stage: Callable[..., object], writes: str) -> Callable[..., object]:
        def run(ctx: Context, *rest: object) -> object:
            before = encode_others(ctx.state, writes)
            result = stage(ctx, *rest)
            assert encode_others(ctx.state, writes) == before, (stage, writes)
            names.add(stage.__name__)
            return result

        return run

    for stage, writes in WRITES.items():
        module = importlib.import_module(stage.__module__)
        monkeypatch.setattr(module, stage.__name__, freeze(stage, writes))
    return names


def test_a_stage_writes_the_records_that_it_names(called: set[str]) -> None:
    for seed in range(1, 6):
        for make in (random_world, environment_world, in_flight_world):
            make(seed).run()
    assert called == {stage.__name__ for stage in WRITES}


def test_the_records_of_stages_exist() -> None:
    assert {name for writes in WRITES.values() for name in writes.split()} < RECORDS
