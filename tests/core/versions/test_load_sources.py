"""The nearest copy of a version: which source is chosen, and what a wrong guess of a rate costs."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from laminar.core.state import keys
from laminar.core.versions.load_sources import (
    LoadSource,
    SourceTier,
    choose_nearest,
    estimate_ms,
    list_sources,
)
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, start_bench

GIB = 1 << 30
SLOW = ev.TransferProblem(
    kind="slow", relay="relay-0", version=0, detail="", num_bytes=9, duration_ms=9, left_bytes=9
)


def _mb_per_s(rate: float) -> int:
    return int(1e6 / rate)  # ps per byte


def test_least_time_wins_and_what_waits_counts():
    own = LoadSource(SourceTier.OWN, "relay-a-0", _mb_per_s(2_000), waiting_bytes=60 * GIB)
    peer = LoadSource(SourceTier.PEER, "relay-b-0", _mb_per_s(1_000))
    disk = LoadSource(SourceTier.DISK, "checkpoints/step-3", _mb_per_s(100))
    assert choose_nearest([disk, own, peer], 4 * GIB).source == peer
    assert (
        choose_nearest([disk, own._replace(waiting_bytes=0), peer], 4 * GIB).source.name
        == "relay-a-0"
    )


def test_a_failed_source_is_left_out_until_it_is_heard_of():
    peers = [
        LoadSource(SourceTier.PEER, f"relay-{m}-0", _mb_per_s(r))
        for m, r in (("b", 900), ("c", 100))
    ]
    assert choose_nearest(peers, GIB, failed={"relay-b-0"}).source == peers[1]
    assert choose_nearest(peers, GIB, failed={p.name for p in peers}).source is None


def test_a_source_that_nobody_has_measured_is_tried_as_its_tier():
    known = LoadSource(SourceTier.PEER, "relay-c-0", _mb_per_s(500))
    new = LoadSource(SourceTier.PEER, "relay-b-0")
    disk = LoadSource(SourceTier.DISK, "checkpoints/step-3", _mb_per_s(400))
    assert choose_nearest([disk, known, new], GIB).source.tier == SourceTier.PEER
    slow = known._replace(ps_per_byte=_mb_per_s(50))
    assert choose_nearest([disk, slow, new], GIB).source == disk


def test_mean_regret_where_rates_change_afterwards():
    """200 cases; each rate changes up to 2 x either way after the choice."""
    draw, regrets = random.Random(7), []
    for _ in range(200):
        tiers = draw.choices(
            (SourceTier.OWN, SourceTier.PEER, SourceTier.PEER, SourceTier.DISK),
            k=draw.randint(2, 6),
        )
        sources = [
            LoadSource(
                t, f"s{i}", _mb_per_s(10 ** draw.uniform(1, 4)), draw.choice((0, GIB, 8 * GIB))
            )
            for i, t in enumerate(tiers)
        ]
        num_bytes = draw.choice((GIB, 16 * GIB, 64 * GIB))
        chosen = choose_nearest(sources, num_bytes).source
        took = {s: estimate_ms(s, num_bytes) * 2 ** draw.uniform(-1, 1) for s in sources}
        regrets.append(took[chosen] / min(took.values()) - 1)
    assert sum(regrets) / len(regrets) <= 0.15, sum(regrets) / len(regrets)


# --- what the coordinator does with it --------------------------------------------------------


def _lost_elsewhere(**settings: Any) -> Bench:
    """rollout-0 is lost with work of version 0, which only the relay of its machine still has, and
    the empty replica of the other machine has loaded version 1."""
    bench = start_bench(settings, nodes=2, groups_per_step=1, max_staleness=1)
    bench.complete("0.1")
    bench.train()
    for relay in bench.relays[1:]:
        bench.receive(relay, 1, held=(1,))
    bench.kill("rollout-0")
    loaded = msgspec.structs.replace(bench.loaded(1), num_bytes=4_000_000)
    bench.say("rollout-1.0", loaded)
    return bench


def test_lost_work_has_its_version_fetched_from_the_machine_that_has_it():
    bench = _lost_elsewhere()
    pull = bench.pull_of("rollout-1.0")
    assert pull is not None and (pull.version, pull.exact) == (0, True)
    assert (pull.holder, pull.address, pull.checkpoint) == ("relay-0", "relay-0:1", "")
    bench.receive("relay-1", 0, held=(0, 1))
    assert bench.state.members.relays["relay-1"].newest == 1, "what was fetched is not the newest"
    resumed = bench.load("rollout-1.0")
    orders = [c for c in resumed if isinstance(c, cmd.GenerateTrajectory)]
    assert {(c.group, c.attempt, c.version) for c in orders} == {("0.0", 1, 0)}


def test_lost_work_waits_on_while_its_version_comes():
    bench = _lost_elsewhere(resume_timeout_ms=1_000)
    bench.wait(5_000)
    lost = [t.id for t in bench.state.work.trajectories.values() if t.group == "0.0"]
    assert lost and all(keys.resume_timer(t) in bench.state.orders.timers for t in lost)
    assert bench.pull_of("rollout-1.0").holder == "relay-0"


def test_relay_that_did_not_give_it_is_asked_again_once_it_is_heard_of():
    bench = _lost_elsewhere(resume_timeout_ms=10**6)
    versions = bench.state.versions
    bench.say("rollout-1.0", ev.VersionMissing(version=0, held=(1,)))
    pull = bench.pull_of("rollout-1.0")
    assert (pull is None or not pull.holder) and versions.failed_sources == {"relay-0": None}
    bench.complete("0.2")
    versions.ps_per_byte.update({"load": _mb_per_s(1), "relay-1": 100_000_000})
    bench.publish(1, 1, held=(0, 1))
    pull = bench.pull_of("rollout-1.0")
    assert not versions.failed_sources and pull is not None and pull.holder == "relay-0"
    due = bench.state.orders.timers[keys.deadline_timer(keys.pull_key("rollout-1.0"))]
    assert due - bench.state.time_ns == 2 * 404_000 * 1_000_000, "twice what it is thought to take"


def test_time_of_a_fetch_runs_from_the_last_word_of_its_bytes():
    bench = _lost_elsewhere()
    timer = keys.deadline_timer(keys.pull_key("rollout-1.0"))
    bench.wait(200_000)
    before = bench.state.orders.timers[timer]
    bench.say("relay-1", SLOW)
    assert bench.state.orders.timers[timer] > before


def test_what_a_holder_was_ordered_to_give_before_is_waited_for():
    """Its own order does not count, nor does what another machine's relay says of that version."""
    bench = _lost_elsewhere(nodes=3)
    bench.load("rollout-2.0")
    state, pull = bench.state, bench.pull_of("rollout-1.0")
    (own,) = list_sources(state, bench.replica("rollout-1.0"), 0)
    (later,) = list_sources(state, bench.replica("rollout-2.0"), 0)
    assert own.name == later.name == pull.holder == "relay-0"
    assert (own.waiting_bytes, later.waiting_bytes) == (0, state.versions.num_bytes)
    before = state.orders.timers[keys.deadline_timer(keys.pull_key("rollout-1.0"))]
    bench.wait(1_000)
    bench.say("relay-2", SLOW)
    assert state.orders.timers[keys.deadline_timer(keys.pull_key("rollout-1.0"))] == before
    bench.receive("relay-1", 0, held=(0, 1))
    (here,) = list_sources(state, bench.replica("rollout-1.0"), 0)
    assert (here.tier, here.name) == (SourceTier.OWN, "relay-1")


def _evaluation_elsewhere() -> Bench:
    """rollout-0 has answered one of three held-out prompts of version 0 when it is lost; only the
    relay of its machine still has that version."""
    bench = start_bench(
        nodes=2, groups_per_step=1, max_staleness=1, num_eval=3, val_before_train=True
    )
    bench.complete("0.0")
    bench.train()
    bench.receive("relay-1", 1, held=(1,))
    loaded = msgspec.structs.replace(bench.loaded(1), num_bytes=4_000_000)
    bench.say("rollout-1.0", loaded)
    while bench.open_groups():
        bench.complete(*bench.open_groups())
    bench.finish("e0.0.0")
    bench.reward("e0.0.0")
    bench.kill("rollout-0")
    return bench


def test_evaluation_goes_on_with_its_version_from_another_machine():
    bench = _evaluation_elsewhere()
    pull = bench.pull_of("rollout-1.0")
    assert pull is not None and (pull.version, pull.exact, pull.holder) == (0, True, "relay-0")
    assert (
        bench.state.evaluations.running.version == 0 and bench.state.evaluations.running.done == 1
    )
    bench.receive("relay-1", 0, held=(0, 1))
    again = [c for c in bench.load("rollout-1.0") if isinstance(c, cmd.GenerateTrajectory)]
    assert {(c.group, c.version) for c in again} == {("e0.1-2", 0), ("e0.2-2", 0)}


def test_evaluation_moves_on_when_nobody_gives_its_version():
    bench = _evaluation_elsewhere()
    again = bench.say("rollout-1.0", ev.VersionMissing(version=0, held=(1,)))
    held_out = [c for c in again if isinstance(c, cmd.GenerateTrajectory) and c.group[0] == "e"]
    assert {(c.group, c.version) for c in held_out} == {(f"e1.{row}", 1) for row in range(3)}
    assert bench.pull_of("rollout-1.0") is None
