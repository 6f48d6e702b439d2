"""Invariants: what must be true after every event, one function and one name each.

Reads   State
Raises  AssertionError with the name of the invariant and what broke it

Tests and the simulator call `check` after every event; they are written from the promises, not from
the code that keeps them, so each counts again what the core only updates.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar import ids
from laminar.core.admission import admits, bound_holds, groups_wanted, room, serving
from laminar.core.buffering import batch_size, steps_done, trainer_idle
from laminar.core.lookup import Lookup
from laminar.core.relays import ending
from laminar.core.state import RUNNING, State
from laminar.core.transitions import IN_ENGINE
from laminar.events import commands as cmd

WEIGHTS_TIMERS = ("weights", "receive:", "rejoin:relay")
"""Replicas that have nothing to do may be waiting for new weights."""


def check(state: State) -> None:
    for invariant in ALL:
        invariant(state)


def ledger_balances(state: State) -> None:
    """issued = trained + evaluated + dropped + live, live being what the state holds."""
    ledger = state.ledger
    live_tokens = sum(t.num_tokens for t in state.trajectories.values())
    _require(ledger.groups.live == len(state.groups), "groups", ledger.groups)
    _require(ledger.trajectories.live == len(state.trajectories), "trajectories")
    _require(ledger.tokens.live == live_tokens, "tokens", ledger.tokens.live, live_tokens)


def trajectory_in_one_place(state: State) -> None:
    """A trajectory in an engine is on exactly one live replica, under its present placement."""
    seen: dict[str, str] = {}
    for replica in state.replicas.values():
        for trajectory_id, placement in replica.running.items():
            _require(trajectory_id not in seen, trajectory_id, seen.get(trajectory_id))
            seen[trajectory_id] = replica.name
            trajectory = state.trajectories[trajectory_id]
            as_placed = trajectory.placement == placement and trajectory.status in IN_ENGINE
            _require(as_placed and trajectory.version == replica.version, trajectory, replica)
    for trajectory in state.trajectories.values():
        if (trajectory.status in IN_ENGINE) != (trajectory.id in seen):
            raise AssertionError(trajectory)


def staleness_within_bound(state: State) -> None:
    """The inequality of core/admission.py holds, and nothing trained was older than allowed."""
    settings = state.settings
    deadlines: dict[int, int] = {}
    for group in state.groups.values():
        if group.purpose == ids.TRAIN and group.status in ("open", "ready"):
            deadlines[group.deadline] = deadlines.get(group.deadline, 0) + 1
    _require(deadlines == state.deadlines, deadlines, state.deadlines)
    _require(bound_holds(deadlines, state.chosen, settings.groups_per_step), deadlines)
    _require(state.staleness_max <= settings.max_staleness, state.staleness_max)


def commands_have_living_owners(state: State) -> None:
    """No outstanding command is addressed to a fenced incarnation."""
    if state.phase not in ("starting", "running", "exporting", "final-evaluation"):
        return
    for key, outstanding in state.commands.items():
        actor = state.actors.get(outstanding.command.to)
        if actor is not None and actor.role != "node":
            _require(actor.alive and actor.incarnation == outstanding.incarnation, key)


def every_wait_has_an_owner(state: State) -> None:
    """Whatever is unfinished is somebody's outstanding command, or a timer will look at it."""
    for trajectory in state.trajectories.values():
        status, key = trajectory.status, trajectory.id
        if status in IN_ENGINE:
            _require(f"generate:{key}" in state.commands, trajectory)
            _require(f"progress:{trajectory.replica}" in state.timers, trajectory)
        elif status == "generated" and state.phase == RUNNING:
            _require(_being_scored(state, key, trajectory.group), trajectory)
    for replica in state.live_replicas():
        _require(replica.loading == (f"pull:{replica.name}" in state.commands), replica)
    if not ending(state):
        _weights_are_on_their_way(state)


def commands_have_deadlines(state: State) -> None:
    """What somebody was told to do is done in time, or he is being restarted.

    A generation is watched by its replica's progress, and the first publish by the deadline of the
    start. When the run ends, what has none is not waited for.
    """
    if ending(state):
        return
    for key, outstanding in state.commands.items():
        command = outstanding.command
        if isinstance(command, cmd.GenerateTrajectory):
            continue
        timed = f"command:{key}" in state.timers or f"restart:{command.to}" in state.commands
        first = isinstance(command, cmd.PublishWeights) and "start" in state.timers
        _require(timed or first, key, outstanding)


def _weights_are_on_their_way(state: State) -> None:
    """Every relay gets the newest version within a time, and every lost one has a time to return.

    The head has it from the trainer, each other from the one before it.
    """
    master = state.master()
    for relay in state.relays.values():
        if relay is not master and relay.newest < state.newest:
            _require(f"receive:{relay.name}" in state.timers, relay)
    if master is not None and master.newest < state.newest:
        _require(state.owed >= 0 or "weights" in state.timers, "the head is not fed", master)
    trainer = state.the("trainer")
    if master is None and trainer is not None and state.newest >= 0:
        awaited = any(name.startswith("rejoin:relay") for name in state.timers)
        _require(awaited, "the trainer's machine has no relay, and nobody waits for one")


def relay_chain_is_path(state: State) -> None:
    """Every relay that is ready is in the chain once, and was told to feed the one behind it."""
    if ending(state):
        return
    ready = {a.name for a in state.actors.values() if a.role == "relay" and a.alive and a.ready}
    _require(set(state.chain) == set(state.relays) == ready, state.chain, ready)
    _require(len(state.chain) == len(state.relays), state.chain)
    trainer = state.the("trainer")
    here = [state.relays[name].node == trainer.node for name in state.chain] if trainer else []
    _require(not any(here[1:]), "the chain does not begin at the trainer", state.chain)
    for name, following in zip(state.chain, [*state.chain[1:], ""], strict=False):
        relay = state.relays[name]
        _require(relay.incarnation == state.actors[name].incarnation, relay)
        _require(relay.successor == following, relay, following)
        outstanding = state.commands.get(f"forward:{name}")
        if outstanding is not None:
            command = outstanding.command
            _require(isinstance(command, cmd.ForwardWeights), command)
            told = getattr(command, "successor", ""), getattr(command, "incarnation", 0)
            asked = state.relays[following].incarnation if following else 0
            _require(told == (following, asked), command, following)


def _being_scored(state: State, trajectory_id: str, group_id: str) -> bool:
    scoring = f"score:{trajectory_id}" in state.commands or f"score:{group_id}" in state.commands
    waits_for_siblings = state.settings.reward_scope == "group"
    return scoring or trajectory_id in state.unscored or waits_for_siblings


def no_standstill(state: State) -> None:
    """While the run runs, the trainer works, or something that it needs is under way.

    Fewer than G unchosen groups => the newest version admits; else all are finished, or have an
    owner and a deadline. Without a live replica the way on is a restart, which has a timer.
    """
    if state.phase != RUNNING or state.draining or not trainer_idle(state) or steps_done(state):
        return
    _require("batch-wait" in state.timers or state.owed >= 0, "no clock runs for the batch")
    live = [r for r in state.live_replicas() if serving(state, r)]
    under_way = any(r.running or r.loading for r in state.live_replicas())
    under_way = under_way or any(k.startswith(("score:", "propose")) for k in state.commands)
    under_way = under_way or any(t.startswith(WEIGHTS_TIMERS) for t in state.timers)
    if not live or under_way or state.lost:
        return
    _require(not batch_size(state), "a batch is finished and nobody trains it")
    unchosen = sum(state.deadlines.values())
    if unchosen < state.settings.groups_per_step and groups_wanted(state) > 0:
        newest = [r for r in live if r.version >= state.newest_for(r)]
        _require(any(admits(state, r) for r in newest), "the newest version does not admit")
        _require(False, "an empty replica that admits was given nothing")
    _require(groups_wanted(state) <= 0, "replicas idle, the trainer waits, data is left")


def lost_work_takes_room(state: State) -> None:
    """Lost work goes on where its version is, whoever admits; after its wait on any newer one."""
    if not state.lost:
        return
    able = {r.version for r in state.live_replicas() if serving(state, r) and room(r) > 0}
    for name in state.lost:
        trajectory = state.trajectories[ids.TrajectoryId(name)]
        waits = f"resume:{name}" in state.timers and not trajectory.restart
        newest = trajectory.version if waits else max(able, default=-1)
        usable = {v for v in able if trajectory.version <= v <= newest}
        _require(not usable, f"version {min(usable, default=-1)} has room for", name)


def versions_monotonic(state: State) -> None:
    """Neither a relay nor a replica is ahead of what was allocated.

    A replica may be ahead of its relay: its word of a load can arrive before the relay's of the
    version."""
    _require(state.newest < state.next_version or state.newest == -1, state.newest)
    for relay in state.relays.values():
        _require(relay.newest < max(state.next_version, 1), relay)
    for replica in state.replicas.values():
        _require(replica.version < state.next_version, replica)
    in_training = 1 if state.batch else 0
    given_up = bool(state.failure)  # the batch of a lost trainer is not completed any more
    _require(state.chosen - state.completed == in_training or given_up, state.chosen)


def evaluation_adds_up(state: State) -> None:
    """Every held-out answer that is done was scored or is missing, and waits for nobody."""
    evaluation = state.evaluation
    if evaluation is None or evaluation.held_out is None:
        return
    held, prompts = evaluation.held_out, evaluation.held_out.prompts.values()
    _require(evaluation.done == held.missing + sum(p.answers for p in prompts), "done", evaluation)
    _require(evaluation.correct == sum(p.right for p in prompts), "correct", evaluation)
    asked = [g for g in state.groups.values() if g.purpose == ids.EVAL and g.status == "open"]
    open_answers = len(evaluation.queue) + len(asked)
    _require(evaluation.done + open_answers == evaluation.total, "total", evaluation)


def lookup_is_true(state: State) -> None:
    """What is kept at hand is what the state implies."""
    kept, made = state.lookup, Lookup(state)
    _require(kept.roles == made.roles, "roles", kept.roles)
    _require(kept.num_alive == made.num_alive, "alive", kept.num_alive)
    addressed = {to: keys for to, keys in kept.commands.items() if keys}
    _require(addressed == made.commands, "commands", addressed)
    served = {relay: names for relay, names in kept.served.items() if names}
    _require(served == made.served, "served", served)
    _require(kept.held == made.held, "held", kept.held)
    held = {replica: found for replica, found in kept.trajectories.items() if found}
    _require(held == made.trajectories, "trajectories", held)
    _require(set(kept.timers) >= set(made.timers), "timers", made.timers)
    _require(kept.ready == made.ready, "ready", kept.ready)
    _require(kept.fetched == made.fetched, "fetched", kept.fetched)
    _require(kept.losses.content() == made.losses.content(), "losses", kept.losses.content())
    _require(kept.roster.content() == made.roster.content(), "roster", kept.roster.content())


def _require(condition: bool, *details: object) -> None:
    if not condition:
        raise AssertionError(*details)


ALL: tuple[Callable[[State], None], ...] = (
    ledger_balances,
    trajectory_in_one_place,
    staleness_within_bound,
    commands_have_living_owners,
    relay_chain_is_path,
    every_wait_has_an_owner,
    commands_have_deadlines,
    no_standstill,
    lost_work_takes_room,
    versions_monotonic,
    evaluation_adds_up,
    lookup_is_true,
)
