"""Invariants: conditions that hold after every event, each one function with a name.

Reads   State
Raises  AssertionError with the name of the invariant and what broke it

Tests and the simulator call `check_invariants` after every event. The invariants follow the
promises, not the code, so each recounts what the core only updates.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.core import store_orders
from laminar.core.repack.stragglers import find_engine_reason, standing_of
from laminar.core.scheduling import sessions
from laminar.core.scheduling.admission import (
    bound_holds,
    count_free_slots,
    groups_wanted,
    is_admitting,
    is_serving,
)
from laminar.core.state import keys
from laminar.core.state.indexes import Indexes, indexes_of, is_streaming, live_actor, master_relay
from laminar.core.state.indexes import find_trainer as source_of
from laminar.core.state.keys import TimerKind
from laminar.core.state.scores import float_of
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, Phase, TrajectoryStatus
from laminar.core.state.transitions import GENERATED, IN_ENGINE, WAITING
from laminar.core.steps.batching import are_steps_done, batch_size, is_trainer_idle
from laminar.core.versions.broadcast import is_run_ending
from laminar.core.waits import list_waits
from laminar.events import commands as cmd
from laminar.events.base import Command, get_tag
from laminar.names import ids
from laminar.names.ids import Purpose
from laminar.names.roles import Role, find_roles


def check_invariants(state: State) -> None:
    for invariant in ALL:
        invariant(state)


def ledger_balances(state: State) -> None:
    """Check that issued = trained + evaluated + dropped + live, as counted from the state."""
    ledger = state.work.ledger
    live_tokens = sum(t.num_tokens for t in state.work.trajectories.values())
    _require(ledger.groups.live == len(state.work.groups), "groups", ledger.groups)
    _require(ledger.trajectories.live == len(state.work.trajectories), "trajectories")
    _require(ledger.tokens.live == live_tokens, "tokens", ledger.tokens.live, live_tokens)


def trajectory_in_one_place(state: State) -> None:
    """Check that a trajectory in an engine is on one live replica, under its present placement."""
    seen: dict[str, str] = {}
    for replica in state.members.replicas.values():
        for trajectory_id, placement in replica.running.items():
            _require(trajectory_id not in seen, trajectory_id, seen.get(trajectory_id))
            seen[trajectory_id] = replica.name
            trajectory = state.work.trajectories[trajectory_id]
            as_placed = trajectory.placement == placement and trajectory.status in IN_ENGINE
            _require(as_placed and trajectory.version == replica.version, trajectory, replica)
    for trajectory in state.work.trajectories.values():
        if (trajectory.status in IN_ENGINE) != (trajectory.id in seen):
            raise AssertionError(trajectory)


def moves_are_whole(state: State) -> None:
    """Check that a migration has one source that does nothing else, and one destination."""
    for name, progress in state.repack.progress.items():
        trajectory = state.work.trajectories[name]
        releasing = trajectory.status == TrajectoryStatus.RELEASING
        _require(releasing or not progress.destination, trajectory, progress)
        _require(releasing == (progress.source == trajectory.replica != ""), trajectory, progress)
        if releasing:
            _require(keys.release_key(trajectory.replica) in state.orders.commands, trajectory)
            _require(name in state.members.replicas[progress.source].outgoing, trajectory)
    for replica in state.members.replicas.values():
        _require(count_free_slots(replica) >= 0, replica)
        if replica.outgoing:
            _require(not replica.loading and not replica.incoming, replica)
            _require(set(replica.running) <= set(replica.outgoing), replica)
        for name in replica.outgoing:
            _require(state.repack.progress[name].source == replica.name, name, replica)
        for name in replica.incoming:
            coming = state.work.trajectories[name]
            _require(not replica.loading and coming.version == replica.version, coming, replica)
            _require(state.repack.progress[name].destination == replica.name, coming, replica)


def staleness_within_bound(state: State) -> None:
    """Check the inequality of core/scheduling/admission.py and the staleness of trained data."""
    settings = state.settings
    deadlines: dict[int, int] = {}
    for group in state.work.groups.values():
        unchosen = group.status in (GroupStatus.OPEN, GroupStatus.READY)
        if group.purpose == Purpose.TRAIN and unchosen:
            deadlines[group.deadline] = deadlines.get(group.deadline, 0) + 1
    _require(deadlines == state.work.deadlines, deadlines, state.work.deadlines)
    _require(bound_holds(deadlines, state.steps.chosen, settings.groups_per_step), deadlines)
    _require(state.steps.staleness_max <= settings.max_staleness, state.steps.staleness_max)


def batches_have_variance(state: State) -> None:
    """Check that with a filter no finished group without variance waits for a batch."""
    metric = state.settings.filter_metric
    for group_id in state.work.ready if metric else ():
        members = map(state.work.trajectories.get, state.work.groups[group_id].members)
        scored = [t for t in members if t and t.status == TrajectoryStatus.REWARDED]
        values = {t.correct if metric == "acc" else float_of(t.reward_bits) for t in scored}
        _require(len(values) > 1 or len(scored) < 2, "no variance", group_id, values)


def commands_have_living_owners(state: State) -> None:
    """Check that each outstanding command has a living addressee, of a role that carries it out."""
    if state.run.phase in (Phase.ENDING, Phase.STOPPING, Phase.ENDED):
        return
    for key, outstanding in state.orders.commands.items():
        command = outstanding.command
        actor = state.members.actors.get(command.to)
        _require(actor is None or actor.role in find_roles(get_tag(command)), key)
        if actor is not None and actor.role != Role.NODE:
            present = actor.alive and actor.incarnation == outstanding.incarnation
            _require(present or _is_kept_for_store(state, command), key)


def _is_kept_for_store(state: State, command: Command) -> bool:
    return store_orders.can_survive_restart(state, command) and store_orders.is_store_awaited(state)


def every_wait_has_an_owner(state: State) -> None:
    """Check that all unfinished work has an outstanding command or a timer that will look at it.

    Nothing is awaited in a stopped run until it is resumed."""
    if state.run.stopped:
        return
    for trajectory in state.work.trajectories.values():
        status, key = trajectory.status, trajectory.id
        if status in IN_ENGINE:
            _require(keys.generate_key(key) in state.orders.commands, trajectory)
            _require(keys.progress_timer(trajectory.replica) in state.orders.timers, trajectory)
        elif status in (GENERATED, WAITING) and state.run.phase == Phase.RUNNING:
            _require(_is_being_scored(state, key, trajectory.group), trajectory)
    for replica in state.members.live_replicas():
        pulls = replica.loading + is_streaming(state, replica.name)
        _require(pulls == (keys.pull_key(replica.name) in state.orders.commands), replica)
    if not is_run_ending(state):
        _check_weights_arrive(state)
        _check_engines_start(state)


def commands_have_deadlines(state: State) -> None:
    """Check that each command has a deadline, or that its actor is being restarted.

    A generation is watched through its replica's progress, and the first publish through the
    deadline of the start. When the run ends, commands without a deadline are not awaited."""
    if is_run_ending(state):
        return
    for key, outstanding in state.orders.commands.items():
        command = outstanding.command
        if isinstance(command, cmd.GenerateTrajectory):
            continue
        timed = (
            keys.deadline_timer(key) in state.orders.timers
            or keys.restart_key(command.to) in state.orders.commands
        )
        first = isinstance(command, cmd.PublishWeights) and keys.START in state.orders.timers
        _require(timed or first or _is_kept_for_store(state, command), key, outstanding)


def _check_engines_start(state: State) -> None:
    """Check that a replica that is not ready will be, or is restarted."""
    for name in _list_starting(state):
        watched = keys.progress_timer(name) in state.orders.timers
        _require(watched or keys.restart_key(name) in state.orders.commands, name)


def _list_starting(state: State) -> list[str]:
    roles = (Role.ROLLOUT, Role.AGENT)
    found = (a for a in state.members.actors.values() if a.role in roles)
    return [a.name for a in found if a.alive and not a.ready]


def _check_weights_arrive(state: State) -> None:
    """Check that every relay gets the newest version in time, and every lost relay can return.

    The head has it from the trainer, each other relay from the one before it."""
    master = master_relay(state)
    for relay in state.members.relays.values():
        if relay is not master and relay.newest < state.versions.newest:
            _require(keys.receive_timer(relay.name) in state.orders.timers, relay)
    if master is not None and master.newest < state.versions.newest:
        _require(
            state.versions.owed >= 0 or keys.WEIGHTS in state.orders.timers,
            "the head gets no weights",
            master,
        )
    trainer = source_of(state)
    if master is None and trainer is not None and state.versions.newest >= 0:
        what = "the trainer's machine has no relay, and none is awaited"
        _require(_is_role_awaited(state, Role.RELAY), what)


def trainer_comes_back(state: State) -> None:
    """Check that an absent trainer has a time to return, and a returned one repeats what is needed.

    The steps that it may have to repeat are known, without a gap, up to the last completed step."""
    if is_run_ending(state) or not state.settings.keeps_checkpoints:
        return
    steps = [t.step_index for t in state.steps.trained]
    _require(steps == list(range(state.steps.completed))[-len(steps) :] if steps else True, steps)
    _require(bool(steps) == bool(state.steps.completed), "the trained steps are unknown")
    if state.versions.newest < 0:
        return  # the deadline of the start is also that of the trainer
    live = live_actor(state, Role.TRAINER)
    if live is None or not live.ready:
        away = [a.name for a in state.members.actors.values() if a.role == Role.TRAINER]
        _require(
            any(keys.rejoin_timer(name) in state.orders.timers for name in away),
            "no process is awaited",
            away,
        )
        _require(state.steps.repeated < 0, state.steps.repeated)
    elif state.steps.repeated >= 0:
        _require(state.steps.repeated <= state.steps.completed, state.steps.repeated)
        told = keys.LOAD in state.orders.commands or keys.REPEAT in state.orders.commands
        _require(
            told and keys.TRAIN not in state.orders.commands,
            "the trainer has no order",
            state.steps.repeated,
        )
    elif state.steps.batch is not None:
        _require(
            keys.TRAIN in state.orders.commands, "no order to train the batch", state.steps.batch
        )


def relay_chain_is_path(state: State) -> None:
    """Check that every ready relay is in the chain once, and is ordered to feed its successor."""
    members = state.members
    if is_run_ending(state):
        return
    ready = {
        a.name for a in members.actors.values() if a.role == Role.RELAY and a.alive and a.ready
    }
    _require(set(members.relay_chain) == set(members.relays) == ready, members.relay_chain, ready)
    _require(len(members.relay_chain) == len(members.relays), members.relay_chain)
    trainer = source_of(state)
    here = (
        [members.relays[name].node == trainer.node for name in members.relay_chain]
        if trainer
        else []
    )
    _require(not any(here[1:]), "the chain does not begin at the trainer", members.relay_chain)
    for name, following in zip(members.relay_chain, [*members.relay_chain[1:], ""], strict=False):
        relay = members.relays[name]
        _require(relay.incarnation == members.actors[name].incarnation, relay)
        _require(relay.successor == following, relay, following)
        outstanding = state.orders.commands.get(keys.forward_key(name))
        if outstanding is not None:
            command = outstanding.command
            _require(isinstance(command, cmd.ForwardWeights), command)
            told = getattr(command, "successor", ""), getattr(command, "incarnation", 0)
            asked = members.relays[following].incarnation if following else 0
            _require(told == (following, asked), command, following)


def _is_being_scored(state: State, trajectory_id: str, group_id: str) -> bool:
    scoring = (
        keys.score_key(trajectory_id) in state.orders.commands
        or keys.score_key(group_id) in state.orders.commands
    )
    waits_for_siblings = state.settings.reward_scope == "group"
    return scoring or trajectory_id in state.work.unscored or waits_for_siblings


def no_standstill(state: State) -> None:
    """Check that something under way ends each phase: a command or a timer with an owner.

    Other invariants check that a command has a deadline, and that work in an engine is watched. In
    a run that has ended nothing is awaited."""
    if state.run.phase != Phase.ENDED:
        _PHASE_CHECKS[state.run.phase](state)


def _starting_ends(state: State) -> None:
    _require(keys.START in state.orders.timers, "no timer for the start")


def _running_ends(state: State) -> None:
    """Check that the trainer works, or is awaited, or that something that it needs is under way.

    Fewer than G unchosen groups => the newest version admits; else all are finished, or have an
    owner and a deadline. Without a replica that serves, one is awaited, or loads."""
    if state.run.draining or not is_trainer_idle(state) or are_steps_done(state):
        _require(_is_trainer_busy(state), "the trainer has no order and is not awaited")
        return
    _require(
        keys.BATCH_TIMEOUT in state.orders.timers or state.versions.owed >= 0,
        "no timer for the batch",
    )
    live = [r for r in state.members.live_replicas() if is_serving(state, r)]
    under_way = _is_replica_busy(state) or _is_answer_awaited(state)
    if state.settings.has_environment and not sessions.list_hosts(state):
        return _require(_is_host_awaited(state), "no host of sessions works, and none is awaited")
    #: idle replicas may be waiting for new weights
    if under_way or _are_weights_awaited(state) or state.work.lost:
        return
    if not live:
        _require(_is_replica_awaited(state), "no replica serves, and none is awaited")
        return
    _require(not batch_size(state), "a batch is complete but not trained")
    unchosen = sum(state.work.deadlines.values())
    if unchosen < state.settings.groups_per_step and groups_wanted(state) > 0:
        newest = [r for r in live if r.version >= state.members.newest_for(r)]
        _require(any(is_admitting(state, r) for r in newest), "the newest version does not admit")
        _require(False, "an empty admitting replica got no work")
    _require(groups_wanted(state) <= 0, "replicas and trainer are idle with data left")


def _exporting_ends(state: State) -> None:
    """Check that the trainer exports, or that something that it needs for that is on its way."""
    way_on = keys.WEIGHTS in state.orders.timers or _is_role_awaited(state, Role.RELAY)
    _require(way_on or _is_trainer_busy(state), "no process exports the model, and none is awaited")


def _check_evaluation_ends(state: State) -> None:
    """Check that the export is evaluated, or due to be, and that a replica can work on it."""
    evaluation = state.evaluations.running
    binds = (
        evaluation is not None and evaluation.final and evaluation.version == state.versions.export
    )
    due = state.evaluations.due == state.versions.export
    _require(state.versions.export >= 0 and (binds or due), "the export will not be evaluated")
    answers = _is_answer_awaited(state) or _is_replica_busy(state) or bool(state.work.lost)
    fed = _are_weights_awaited(state) or _is_trainer_busy(state)
    awaited = _is_replica_awaited(state) or _is_host_awaited(state)
    way_on = answers or fed or awaited
    _require(way_on, "no process works on the last evaluation, and none is awaited")


def _ending_ends(state: State) -> None:
    writing = any(
        isinstance(outstanding.command, cmd.EndTrajectories)
        and keys.deadline_timer(key) in state.orders.timers
        for key, outstanding in state.orders.commands.items()
    )
    _require(writing or store_orders.is_store_awaited(state), "no process writes the last ends")


def _stopping_ends(state: State) -> None:
    stopping = any(
        isinstance(outstanding.command, cmd.StopActor)
        and keys.deadline_timer(key) in state.orders.timers
        for key, outstanding in state.orders.commands.items()
    )
    _require(stopping, "no process is stopping")


_PHASE_CHECKS = {
    Phase.STARTING: _starting_ends,
    Phase.RUNNING: _running_ends,
    Phase.EXPORTING: _exporting_ends,
    Phase.FINAL_EVALUATION: _check_evaluation_ends,
    Phase.ENDING: _ending_ends,
    Phase.STOPPING: _stopping_ends,
}


def _is_trainer_busy(state: State) -> bool:
    """Return whether the trainer has an order or is awaited, or a pause waits for responses."""
    if state.run.pausing and keys.PAUSE in state.orders.timers:
        return True
    orders = (keys.TRAIN, keys.PUBLISH, keys.EXPORT, keys.SAVE, keys.LOAD, keys.REPEAT)
    return any(key in state.orders.commands for key in orders) or _is_role_awaited(
        state, Role.TRAINER
    )


def _is_replica_busy(state: State) -> bool:
    return any(r.running or r.loading for r in state.members.live_replicas())


def _is_answer_awaited(state: State) -> bool:
    """Return whether a reward, a session or a batch strategy is asked, or a session has no host."""
    answered = (cmd.StartSession, cmd.ScoreTrajectories, cmd.ProposeBatch)
    asked = any(isinstance(o.command, answered) for o in state.orders.commands.values())
    return asked or (bool(state.work.unscored) and _is_host_awaited(state))


def _is_host_awaited(state: State) -> bool:
    starts = keys.START in state.orders.timers or _is_starting(state, Role.AGENT)
    return starts or _is_role_awaited(state, Role.AGENT)


def _is_starting(state: State, role: Role) -> bool:
    """Return whether a process of this role is to be ready in time."""
    timed = (name for name in _list_starting(state) if name.startswith(role))
    return any(keys.progress_timer(name) in state.orders.timers for name in timed)


def _are_weights_awaited(state: State) -> bool:
    if keys.WEIGHTS in state.orders.timers or _is_role_awaited(state, Role.RELAY):
        return True
    return any(keys.receive_timer(name) in state.orders.timers for name in state.members.relays)


def _is_replica_awaited(state: State) -> bool:
    """Return whether a replica is restarting, its engine starts, or the start still waits."""
    starts = _is_starting(state, Role.ROLLOUT)
    return starts or keys.START in state.orders.timers or _is_role_awaited(state, Role.ROLLOUT)


def _is_role_awaited(state: State, role: Role) -> bool:
    """Return whether a process of this role has a time to return, or is about to be restarted.

    It may not have joined yet; its name begins with its role."""
    timers = map(keys.parse_timer, state.orders.timers)
    if any(t.kind == TimerKind.REJOIN and t.subject.startswith(role) for t in timers):
        return True
    actors = (a.name for a in state.members.actors.values() if a.role == role)
    return any(keys.restart_key(name) in state.orders.commands for name in actors)


def some_wait_is_listed(state: State) -> None:
    """Check that a run that has not ended waits for something, and that each wait has an owner."""
    if state.run.phase != Phase.ENDED:
        waits = list_waits(state)
        _require(bool(waits), "the table of waits is empty")
        known = {*state.members.actors, *Role}
        _require(all(wait.owner in known for wait in waits), "a wait has no owner", waits)


def lost_work_takes_room(state: State) -> None:
    """Check that lost work resumes where its version has room, even if nothing new is admitted.

    After its wait this holds for any newer version, too."""
    if not state.work.lost:
        return
    able = {
        r.version
        for r in state.members.live_replicas()
        if is_serving(state, r) and count_free_slots(r) > 0
    }
    for name in state.work.lost:
        trajectory = state.work.trajectories[ids.TrajectoryId(name)]
        waits = keys.resume_timer(name) in state.orders.timers and not trajectory.restart
        newest = trajectory.version if waits else max(able, default=-1)
        usable = {v for v in able if trajectory.version <= v <= newest}
        _require(not usable, f"version {min(usable, default=-1)} has room for", name)


def versions_monotonic(state: State) -> None:
    """Check that no relay or replica is ahead of the allocated versions.

    A replica may be ahead of its relay: its report of a load can arrive before the relay's of the
    version."""
    _require(
        state.versions.newest < state.versions.next or state.versions.newest == -1,
        state.versions.newest,
    )
    for relay in state.members.relays.values():
        _require(relay.newest < max(state.versions.next, 1), relay)
    for replica in state.members.replicas.values():
        _require(replica.version < state.versions.next, replica)
    in_training = 1 if state.steps.batch else 0
    given_up = bool(state.run.failed)  # the batch of a lost trainer is not completed any more
    _require(
        state.steps.chosen - state.steps.completed == in_training or given_up, state.steps.chosen
    )


def evaluation_adds_up(state: State) -> None:
    """Check that each finished evaluation sample is scored or missing, and the counts agree."""
    evaluation = state.evaluations.running
    if evaluation is None or evaluation.counts is None:
        return
    held, prompts = evaluation.counts, evaluation.counts.prompts.values()
    _require(evaluation.done == held.missing + sum(p.answers for p in prompts), "done", evaluation)
    _require(evaluation.correct == sum(p.correct for p in prompts), "correct", evaluation)
    held_out = [g for g in state.work.groups.values() if g.purpose == Purpose.EVAL]
    asked = [g for g in held_out if g.status == GroupStatus.OPEN]
    open_answers = len(evaluation.queue) + len(asked)
    _require(evaluation.done + open_answers == evaluation.total, "total", evaluation)


def indexes_match_state(state: State) -> None:
    """Check that the indexes equal those rebuilt from the state."""
    kept, made = indexes_of(state), Indexes(state)
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
    _require(kept.from_afar == made.from_afar, "from afar", kept.from_afar)
    _require(kept.lengths == made.lengths, "lengths", kept.lengths)
    hosted = {host: found for host, found in kept.sessions.items() if found}
    _require(hosted == made.sessions, "sessions", hosted)
    _require(
        kept.lost.to_comparable() == made.lost.to_comparable(),
        "lost work",
        kept.lost.to_comparable(),
    )
    _require(
        kept.replicas.to_comparable() == made.replicas.to_comparable(),
        "replicas",
        kept.replicas.to_comparable(),
    )
    for name, standing in kept.standings.items():
        replica = state.members.replicas[name]
        _require(not find_engine_reason(state, replica), "in its tail", replica)
        _require(standing_of(state, replica) == (standing, True), "standing", standing)


def _require(condition: bool, *details: object) -> None:
    if not condition:
        raise AssertionError(*details)


ALL: tuple[Callable[[State], None], ...] = (
    ledger_balances,
    trajectory_in_one_place,
    moves_are_whole,
    staleness_within_bound,
    batches_have_variance,
    commands_have_living_owners,
    trainer_comes_back,
    relay_chain_is_path,
    every_wait_has_an_owner,
    commands_have_deadlines,
    no_standstill,
    some_wait_is_listed,
    lost_work_takes_room,
    versions_monotonic,
    evaluation_adds_up,
    indexes_match_state,
)
