"""Random configurations of the test world, and checks of a run that has ended.

Reads   a seed
Gives   a World; `check_end` compares the three books (trainer, store, ledger)
"""

from __future__ import annotations

import random

import msgspec

from laminar.core.state.failures import FailureKind
from laminar.core.state.state import Settings
from laminar.names import exit_codes
from tools.kit.world import World
from tools.kit.world_parts import SECOND, Faults, settings

BOUNDARIES = {
    "groups_per_step": (1,), "groups_per_version": (1,), "max_staleness": (0,),
    "total_steps": (1, 11), "test_freq": (1,), "resume_timeout_ms": (0,),
}  # fmt: skip
BOUNDARY_SHARE = 0.06


def random_world(seed: int, kind: type[World] = World) -> World:
    """Return the world of a seed, always with the same settings, faults and timing."""
    chance = random.Random(seed)
    choose = chance.choice
    config, faults = _settings(chance, seed), _faults(chance, seed)
    repack = random.Random(f"repack {seed}")
    policy = repack.choice(["", "gain", "best-fit"])
    replicas = choose([1, 2, 3]) + (repack.choice([1, 3]) if policy else 0)
    nodes = choose(range(1, replicas + 1))
    faults.lose_relay_every_s = choose([0, 0, 6, 20])
    if nodes > 1:
        _add_machine_faults(faults, chance, seed)
    world = kind(
        config,
        replicas=replicas,
        nodes=nodes,
        capacity=config.group_size * choose([1, 2, 4]),
        num_train=choose([10, 30]),
        num_eval=choose([0, 5]),
        faults=faults,
        seed=seed,
    )
    faults.save, faults.damage_checkpoint = choose([0, 0.5, 1]), choose([0, 0.3])
    faults.fail_reward = choose([0, 0, 0, 0.1, 0.6])
    if policy:
        _add_repack(world, policy, repack)
    permille = choose([500, 1000]) if faults.fail_reward else 1000
    answers = random.Random(f"answers {seed}").choice([1, 3])
    world.settings = msgspec.structs.replace(
        world.settings, max_error_permille=permille, eval_answers=answers
    )
    _add_filter(world, seed)
    _add_lost_trainers(world, seed)
    _draw_boundaries(world, seed)
    return world


def _draw_boundaries(world: World, seed: int) -> None:
    """Occasionally give settings their minimum or two digits.

    Data have one prompt, or as many as the steps take."""
    chance, made = random.Random(f"boundaries {seed}"), dict[str, int]()
    for key, values in BOUNDARIES.items():
        struck, value = chance.random() < BOUNDARY_SHARE, chance.choice(values)
        if struck:
            made[key] = value
    world.settings = settings = msgspec.structs.replace(world.settings, **made)
    if chance.random() < BOUNDARY_SHARE:
        steps = settings.total_steps or 3
        world.num_train = chance.choice([1, settings.groups_per_step * steps])


def _settings(chance: random.Random, seed: int) -> Settings:
    choose = chance.choice
    group_size = choose([2, 4])
    return settings(
        seed=seed,
        groups_per_step=choose([1, 2, 4, 8]),
        group_size=group_size,
        max_staleness=choose([0, 0, 1, 2, 4]),
        groups_per_version=choose([1, 2, 4]),
        total_steps=choose([0, 6]),
        test_freq=choose([0, 2]),
        batch_strategy=choose(["deadline", "priority", "strategies.py:mine"]),
        reward_scope=choose(["trajectory", "group"]),
        batch_timeout_ms=choose([5_000, 60_000]),
        drop_last=choose([True, False]),
        resume_timeout_ms=choose([100, 3_000]),
    )


def _faults(chance: random.Random, seed: int) -> Faults:
    choose = chance.choice
    faults = Faults(
        lose_every_s=choose([0, 0, 6, 20, 60]),
        drain_at_s=choose([0, 0, 0, 0, 5, 20]),
        skip_publish=choose([0, 0.3]),
        fail_sibling=choose([0, 0.02, 0.2]),
        reject_weights=choose([0, 0, 0.05]),
        repeat_event=choose([0, 0.2]),
        refuse_sibling=choose([0, 0, 0.02]),
        hang=choose([0, 0, 0.02]),
        train_s=choose([0.1, 1, 5]),
    )
    faults.leave_out = random.Random(f"left out {seed}").choice([0, 0, 0.1, 0.6])
    return faults


def _add_machine_faults(faults: Faults, chance: random.Random, seed: int) -> None:
    """Add the faults of a run on several machines."""
    choose = chance.choice
    faults.damaged_chunk = choose([0, 0.3])
    faults.wrong_bytes = choose([0, 0, 0.05])
    faults.deaf = choose([0, 0, 0.1])
    faults.lose_machine_at_s = choose([0, 0, 0, 6])
    faults.silent_node_at_s = random.Random(f"silent {seed}").choice([0, 0, 1, 6])


def _add_filter(world: World, seed: int) -> None:
    chance = random.Random(f"filter {seed}")
    metric, batches = chance.choice(["", "", "", "", "score", "acc"]), chance.choice([1, 20])
    if metric:
        world.settings = msgspec.structs.replace(
            world.settings, filter_metric=metric, filter_batches=batches
        )


def _add_repack(world: World, policy: str, repack: random.Random) -> None:
    world.max_batch = repack.choice([world.settings.group_size, world.capacity])
    world.kv_capacity = repack.choice([50, 1_000])
    world.faults.slow_release = repack.choice([0, 0.3])
    world.settings = msgspec.structs.replace(
        world.settings,
        repack_policy=policy,
        repack_interval_ms=repack.choice([200, 2_000]),
        repack_release_timeout_ms=2_000,
        repack_prefill_tokens=repack.choice([1, 500]),
    )


def _add_lost_trainers(world: World, seed: int) -> None:
    """Add losses of the trainer and its machine, which a run survives only with checkpoints."""
    faults, trainer = world.faults, random.Random(f"trainer {seed}")
    faults.lose_trainer_every_s = trainer.choice([0, 0, 6, 20])
    faults.redo_differs = trainer.choice([0, 0, 0.3])
    if faults.lose_trainer_every_s:
        faults.trainer_losses = 6
        faults.replace_machine_at_s = random.Random(f"machine {seed}").choice([0, 0, 0, 2, 6])
        world.settings = msgspec.structs.replace(world.settings, save_freq=1)


def in_flight_world(seed: int, kind: type[World] = World) -> World:
    """Return a random world with in-flight weight updates in place of repack."""
    world = random_world(seed, kind)
    world.settings = msgspec.structs.replace(
        world.settings, repack_policy="", in_flight=True, groups_per_version=0
    )
    return world


def environment_world(seed: int, kind: type[World] = World) -> World:
    """Return a random or in-flight world whose responses may have several turns."""
    chance = random.Random(f"environment {seed}")
    world = chance.choice([random_world, in_flight_world])(seed, kind)
    world.settings = msgspec.structs.replace(
        world.settings,
        max_sessions=chance.choice([1, 2]) * world.capacity,
        reward_scope="trajectory",
    )
    world.add_hosts()
    world.faults.turns = chance.choice([0.3, 0.6, 1.0])
    world.faults.repeat_effects = chance.choice([True, False])
    world.faults.lost_answer = chance.choice([0, 0, 0.1])
    return world


def failing_world(seed: int, kind: type[World] = World) -> World:
    """Return a random world in which a process that the run needs dies and stays dead."""
    world = random_world(seed, kind)
    choose = random.Random(seed).choice
    world.faults.fatal_role = choose(["node", "store", "relay", "trainer"])
    world.faults.fatal_at_s = choose([0.2, 1.5, 6, 15])
    return world


def pausing_world(seed: int, kind: type[World] = World) -> World:
    """Return a random world whose run is asked to pause."""
    world = random_world(seed, kind)
    world.settings = msgspec.structs.replace(world.settings, save_freq=100)
    world.faults.drain_pauses = True
    world.faults.drain_at_s = random.Random(f"pause {seed}").choice([0.2, 1.5, 6, 15])
    return world


def check_paused(world: World) -> None:
    """Check a paused run: complete steps are saved unless a trainer was lost, the rest is open."""
    state = world.state
    if not state.run.paused:
        return check_end(world)  # it was over before
    assert (state.run.exit_code, state.run.failure) == (exit_codes.PAUSED, "")
    safe = not (world.faults.lose_trainer_every_s or world.faults.replace_machine_at_s)
    if safe and state.steps.completed:
        assert state.steps.completed in {len(batches) for batches in world.saved.values()}
    ended = [t for t, row in world.rows.items() if row.end == "trained"]
    trained = {t for step in range(state.steps.completed) for t in world.consumed[step]}
    assert trained >= set(ended) and len(ended) == state.work.ledger.trajectories.trained


def check_failed(world: World) -> None:
    """Check that a failed run has a reason, an exit code, and books that the store could close."""
    if world.now < world.faults.fatal_at_s * SECOND:
        return check_end(world)  # it was over before
    state, ledger = world.state, world.state.work.ledger
    if state.versions.export >= 0 and not state.run.failure:
        return check_end(world)  # it had all that it needed
    failed, role = state.run.failed, world.faults.fatal_role
    assert failed is not None and failed.kind.record.exit_code == exit_codes.FAILED
    lost = failed.kind.record.loss and (role in failed.subject or role == "node")
    assert lost or failed == state.run.drain_failure, failed
    if role not in ("store", "node"):  # a lost node has taken the store along
        assert ledger.groups.live == ledger.trajectories.live == ledger.tokens.live == 0, ledger
        assert all(row.end for row in world.rows.values())


def check_end(world: World) -> None:
    """Check that a run ended gracefully: nothing is live, and three independent books agree.

    It has failed only where the reward did, or a batch has ended its trainers."""
    state, ledger = world.state, world.state.work.ledger
    given_up = state.run.failed is not None and state.run.failed.kind == FailureKind.BATCH_FATAL
    assert given_up or state.run.failed == state.run.drain_failure, state.run.failed
    assert state.run.exit_code == (exit_codes.FAILED if state.run.failed else exit_codes.COMPLETE)
    assert ledger.groups.live == ledger.trajectories.live == ledger.tokens.live == 0, ledger
    ends = [row.end for row in world.rows.values()]
    assert all(ends), "the store has a trajectory without an end"
    assert len(ends) == ledger.trajectories.issued
    assert ends.count("trained") == ledger.trajectories.trained
    ended = {t for t, row in world.rows.items() if row.end == "trained"}
    trained = [t for step in range(state.steps.completed) for t in world.consumed[step]]
    assert ended == set(trained) and len(ended) == len(trained)
    assert ends.count("evaluated") == ledger.trajectories.evaluated
    tokens = sum(row.num_tokens + row.tokens_lost for row in world.rows.values())
    assert tokens == ledger.tokens.issued
    prompts = sorted({group_number(world, t) for t in world.rows if not t.startswith("e")})
    assert prompts == list(range(state.data.cursor)), "a prompt was handed out to no process"
    if state.run.draining or given_up:
        return
    assert state.settings.total_steps in (0, state.steps.completed)
    assert not world.num_eval or state.evaluations.results[-1].final


def group_number(world: World, trajectory_id: str) -> int:
    """Return the number of a trajectory's prompt, counted over all passes."""
    pass_index, position, _ = map(int, trajectory_id.split("."))
    return pass_index * world.num_train + position
