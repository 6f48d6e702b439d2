"""What a replica in its tail holds is counted once and kept; whatever changes it is seen at once.

The invariants compare what is kept with the state after every event; here is for each change a
story in which nothing else makes the replica be counted again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laminar.core.repack.stragglers import tails
from laminar.core.state.indexes import Indexes, assign, indexes_of, set_length
from laminar.core.state.straggler_load import StragglerLoad
from laminar.names.ids import TrajectoryId
from tests.core.repack.test_migration import DESTINATION, MOVED, OTHER, SOURCE, Tail, moving
from tools.kit.bench import Bench


def kept(bench: Bench) -> dict[str, StragglerLoad]:
    """Of all replicas in their tail; now they are kept."""
    found = tails(bench.state)
    assert indexes_of(bench.state).standings
    return {standing.name: standing for of_version in found.values() for standing in of_version}


def test_what_has_not_changed_is_counted_once() -> None:
    bench = Tail()
    first = kept(bench)
    counted = dict(indexes_of(bench.state).standings)
    assert len(counted) == 3 and kept(bench) == first
    assert all(indexes_of(bench.state).standings[name] is counted[name] for name in counted)


def test_what_its_engine_tells_is_counted() -> None:
    bench = Tail()
    assert kept(bench)[SOURCE].kv_tokens == 10
    bench.gauge(SOURCE, lengths={TrajectoryId(MOVED): 17})
    assert kept(bench)[SOURCE].kv_tokens == 17


def test_what_is_still_to_come_counts_at_its_destination() -> None:
    bench = moving()
    before = kept(bench)[DESTINATION]
    bench.gauge(SOURCE, lengths={TrajectoryId(MOVED): 20})
    assert kept(bench)[DESTINATION].kv_tokens == before.kv_tokens + 10


def test_prompt_of_what_has_started_is_counted() -> None:
    bench = moving()
    bench.say(SOURCE, bench.released())
    bench.gauge(DESTINATION)
    before = kept(bench)[DESTINATION]
    begun = msgspec.structs.replace(bench.begun(MOVED), tokens_resumed=12, prompt_tokens=30)
    bench.say(DESTINATION, begun)
    assert kept(bench)[DESTINATION].kv_tokens == before.kv_tokens + 30


def test_what_others_run_is_not_told_of() -> None:
    """Late words about work that is elsewhere by now."""
    bench = Tail()
    before = dict(kept(bench))
    bench.gauge(OTHER, lengths={TrajectoryId(MOVED): 90})
    bench.say(OTHER, bench.begun(MOVED))
    assert bench.state.ignored["TrajectoryStarted: old-placement"] == 1
    assert kept(bench)[SOURCE] == before[SOURCE]


def test_without_finished_siblings_nothing_is_kept() -> None:
    """The mean of all that has finished changes with every one."""
    bench = Tail()
    indexes = indexes_of(bench.state)
    indexes.lengths.clear()
    first, again = tails(bench.state)[0], tails(bench.state)[0]
    assert first == again and not indexes.standings


def of_three() -> tuple[Bench, dict[str, Any]]:
    """0.0.0 on rollout-0, 0.0.1 on rollout-1; rollout-2 has none of the group."""
    bench = Bench(replicas=3, repack_policy="gain", repack_interval_ms=5_000)
    bench.start()
    assign(bench.state, bench.trajectory("0.0.1"), DESTINATION)
    standings: dict[str, Any] = indexes_of(bench.state).standings
    standings |= dict.fromkeys((SOURCE, DESTINATION, OTHER), True)
    return bench, standings


def test_length_of_what_has_finished_counts_for_its_siblings_elsewhere() -> None:
    bench, standings = of_three()
    set_length(bench.state, bench.trajectory("0.0.0"), 40)
    assert list(standings) == [OTHER]
    assert indexes_of(bench.state).lengths == {"0.0": (1, 40)}
    set_length(bench.state, bench.trajectory("0.0.0"), 50)
    assert indexes_of(bench.state).lengths == {"0.0": (1, 50)} == Indexes(bench.state).lengths


def test_length_of_what_is_forgotten_counts_no_longer() -> None:
    """Its reward failed, and its siblings go on."""
    bench = Bench(group_size=3, capacity=3, repack_policy="gain", repack_interval_ms=5_000)
    bench.start()
    bench.finish("0.0.0")
    assert indexes_of(bench.state).lengths
    bench.fail("0.0.0")
    standings: dict[str, Any] = indexes_of(bench.state).standings
    standings[SOURCE], bench.checked = True, False
    bench.write_ends()
    assert not standings and not indexes_of(bench.state).lengths
