"""The plan of repack: no plan goes over a cache or a batch, and it empties as many as it can."""

from __future__ import annotations

import random
from collections.abc import Sequence

from laminar.core.repack.packing import PlannedMigration, plan_packing
from laminar.core.state.migrations import StragglerLoad

STATES = 500
CAPACITY, BATCH = 1_000, 64


def standing(name: str, kv: int, running: int, **changes: int) -> StragglerLoad:
    values = {"need": kv, "longest": 100, "room": 100}
    values |= {"kv_capacity": CAPACITY, "max_batch": BATCH, "movable": True}
    return StragglerLoad(name=name, kv_tokens=kv, running=running, **(values | changes))  # type: ignore[arg-type]


def drawn(chance: random.Random) -> list[StragglerLoad]:
    share = chance.choice([0.1, 0.3, 0.6])
    return [
        standing(
            f"r{number}",
            kv := int(CAPACITY * chance.random() * share) + 1,
            chance.randint(1, int(BATCH * share)),
            need=kv + chance.choice([0, kv // 8]),
            longest=chance.randint(1, 4_000),
        )
        for number in range(chance.randint(1, 12))
    ]


def printed(tail: Sequence[StragglerLoad]) -> list[PlannedMigration]:
    """Algorithm 1 as it is printed; its plans may go over a limit."""
    order = sorted(tail, key=lambda s: s.kv_tokens)
    planned: dict[str, list[StragglerLoad]] = {s.name: [] for s in order}
    emptied: set[str] = set()
    moves = []
    for source in order:
        fits = [
            d
            for d in order
            if d.name not in emptied | {source.name}
            and d.kv_tokens + sum(p.need for p in (*planned[d.name], source)) <= d.kv_capacity
            and d.running + sum(p.running for p in (*planned[d.name], source)) <= d.max_batch
        ]
        if fits:
            best = max(fits, key=lambda d: d.kv_tokens + sum(p.need for p in planned[d.name]))
            planned[best.name].append(source)
            emptied.add(source.name)
            moves.append(PlannedMigration(source.name, best.name))
    return moves


def legal(tail: Sequence[StragglerLoad], moves: Sequence[PlannedMigration]) -> bool:
    """Nobody is emptied twice or after it was given work, and every limit is kept."""
    by_name = {s.name: s for s in tail}
    sources = [m.source for m in moves]
    if len(set(sources)) < len(sources) or set(sources) & {m.destination for m in moves}:
        return False
    for name, here in by_name.items():
        given = [by_name[m.source] for m in moves if m.destination == name]
        if given and (
            here.need + sum(s.need for s in given) > here.kv_capacity
            or here.running + sum(s.running for s in given)
            > min(here.max_batch, here.running + here.room)
        ):
            return False
    return True


def test_no_plan_goes_over_a_limit() -> None:
    chance = random.Random(1)
    emptied = wanted = 0
    for _ in range(STATES):
        tail = drawn(chance)
        moves = plan_packing(tail, len(tail), 0)
        assert legal(tail, moves), (tail, moves)
        assert len(plan_packing(tail, 2, 0)) == min(2, len(moves))
        gain = plan_packing(tail, len(tail), 500)
        assert legal(tail, gain) and len(gain) <= len(tail)
        now = [s._replace(need=s.kv_tokens) for s in tail]
        paper = printed(now)
        if legal(now, paper):
            emptied += len(plan_packing(now, len(tail), 0))
            wanted += len(paper)
    assert emptied >= 0.95 * wanted > 0


def test_example_in_which_the_printed_algorithm_overloads() -> None:
    """A destination is not emptied later: the cache of r2 would hold 100 of 99."""
    tail = [standing(f"r{kv}", kv, 1, kv_capacity=99) for kv in (1, 2, 3, 94)]
    assert not legal(tail, printed(tail))
    assert plan_packing(tail, 4, 0) == [
        PlannedMigration("r1", "r94"),
        PlannedMigration("r2", "r94"),
    ]


def test_only_what_may_move_and_can_be_used_is_emptied() -> None:
    tail = [standing("a", 10, 1, movable=False), standing("b", 20, 1), standing("c", 30, 1)]
    assert plan_packing(tail, 3, 0) == [PlannedMigration("b", "c")]
    assert plan_packing(tail, 0, 0) == []


def test_what_costs_more_than_it_gains_is_left() -> None:
    """A long prefill stops the whole batch of the destination; a short rest is soon over."""
    tail = [standing("a", 400, 2, longest=3), standing("b", 500, 60, longest=3)]
    assert plan_packing(tail, 2, 0) == [PlannedMigration("a", "b")]
    assert plan_packing(tail, 2, 1) == []
    tail = [standing("a", 400, 2, longest=2_000), standing("b", 500, 30, longest=2_000)]
    assert plan_packing(tail, 2, 500) == [PlannedMigration("a", "b")]


def test_what_they_need_counts_and_not_what_they_hold() -> None:
    """Room is left for what is sampled yet."""
    tail = [standing("a", 400, 1), standing("b", 500, 1)]
    assert plan_packing(tail, 2, 0)
    assert plan_packing([s._replace(need=s.kv_tokens + 200) for s in tail], 2, 0) == []
