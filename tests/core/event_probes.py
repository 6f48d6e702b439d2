"""Every event that somebody could report in a given situation, true or not.

Reads   State (to name what exists in it) and a source of chance
Gives   lists of events by type: those that fit the situation, and the same with spoiled numbers,
        ids and versions, as a broken or hostile process might send them
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, TypeVar

import msgspec

from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.names.ids import ActorName, GroupId, TrajectoryId
from tools.kit.event_cells import STATUSES
from tools.kit.message_samples import field_types, sample
from tools.kit.world_parts import coordinator_started, step_completed

NUMBERS = (-(2**63), -1, 0, 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "0.0.0", "no such thing")
NUMBER_LISTS = ((), (-1, 0), (2**64 - 1,))
GROUP_LISTS = ((), ("0.0", "0.0"), ("no such group",))


def fitting(state: State, peer: str) -> dict[type[Event], list[Event]]:
    """Events that the actor `peer` might truly report now, and near misses of them."""
    return {
        kind: list(_MAKERS[kind](state, peer) if kind in _MAKERS else _derived(kind, state, peer))
        for kind in ev.ALL_EVENTS
    }


Struct = TypeVar("Struct", bound=msgspec.Struct)


def spoiled(event: Struct, chance: random.Random) -> Struct:
    """The event (or a part of one) with one or two fields that nobody can mean."""
    changes: dict[str, Any] = {}
    fields = event.__struct_fields__
    for name in chance.sample(fields, min(len(fields), chance.choice([1, 1, 2]))):
        spoil = _spoil(getattr(event, name), chance)
        if spoil is not None:
            changes[name] = spoil
    return msgspec.structs.replace(event, **changes)


def _spoil(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):  # the wire takes no other word
        return chance.choice(list(type(value)))
    if isinstance(value, int):
        return chance.choice((*NUMBERS, value - 1, value + 1))
    if isinstance(value, str):
        return chance.choice(TEXTS)
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        return tuple(spoiled(row, chance) for row in value)
    if isinstance(value, tuple) and value:
        return chance.choice(NUMBER_LISTS if isinstance(value[0], int) else GROUP_LISTS)
    return None  # settings and metrics: the machine does not look into them


# --- from the fields of an event ----------------------------------------------------------------


def _derived(kind: type[Event], state: State, peer: str) -> Iterator[Event]:
    """One that may be true, and the same with each of the other values that a field can have."""
    known: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    for names, values in _choices(kind, state, peer):
        first, *rest = values
        known |= zip(names, first, strict=True)
        others += [dict(zip(names, value, strict=True)) for value in rest]
    for changes in ({}, *others):
        yield sample(kind, **(known | changes))


def _choices(
    kind: type[Event], state: State, peer: str
) -> Iterator[tuple[tuple[str, ...], list[tuple[Any, ...]]]]:
    """Names of fields that belong together, each with the values that they have together."""
    left = field_types(kind)
    for names, make in _TOGETHER.items():
        if left.keys() >= set(names):
            yield names, list(make(state, peer))
            left = {name: hint for name, hint in left.items() if name not in names}
    for name, hint in left.items():
        if hint is bool:
            yield (name,), [(False,), (True,)]
        elif isinstance(hint, type) and issubclass(hint, Enum):
            yield (name,), [(word,) for word in hint]


def _placements(state: State, peer: str) -> Iterator[tuple[TrajectoryId, int]]:
    """One trajectory of each status under its placement, and placements that nobody holds."""
    for status in STATUSES:
        found = next((t for t in state.work.trajectories.values() if t.status == status), None)
        if found is not None:
            for placement in (found.placement, found.placement - 1, found.placement + 1):
                yield found.id, placement
    yield TrajectoryId("9.9.9"), 1


def _versions(state: State, peer: str) -> Iterator[tuple[int, int]]:
    version = state.versions.next - 1
    yield from ((version, version), (version, version - 1), (version + 1, version + 1))


def _incarnations(state: State, role: str) -> Iterator[tuple[str, int]]:
    """Names and incarnations: present, old and unknown ones."""
    for actor in state.members.actors.values():
        if actor.role.startswith(role):
            yield from ((actor.name, actor.incarnation), (actor.name, actor.incarnation - 1))
    yield f"{role or 'rollout'}-99", 1


#: Values of fields that depend on the situation, by the fields that have them together.
_TOGETHER: dict[tuple[str, ...], Callable[[State, str], Iterable[tuple[Any, ...]]]] = {
    ("actor", "actor_incarnation"): lambda state, peer: _incarnations(state, ""),
    ("node", "node_incarnation"): lambda state, peer: _incarnations(state, "node"),
    ("trajectory_id", "placement"): _placements,
    ("version", "step"): _versions,
    ("version", "step_index"): _versions,
    ("version",): lambda state, peer: [(_pulled(state, peer),)],
    ("tokens_total",): lambda state, peer: [(0,), (state.seq,)],
    ("reward_bits",): lambda state, peer: [(0,), (0x7FF8 << 48,)],
    ("num_train",): lambda state, peer: [(30,), (0,)],
}

# --- of which the fields say too little ---------------------------------------------------------


def _coordinator_started(state: State, peer: str) -> Iterator[Event]:
    yield coordinator_started(state.settings, state.members.coordinator_incarnation + 1)


def _timer_fired(state: State, peer: str) -> Iterator[Event]:
    yield ev.TimerFired(timer="resume:no such trajectory")
    kinds = {name.rpartition(":")[0] or name: name for name in state.orders.timers}
    for name in kinds.values():
        yield ev.TimerFired(timer=name)


def _batch_proposed(state: State, peer: str) -> Iterator[Event]:
    ready = tuple(state.work.ready)[: state.settings.groups_per_step]
    for groups in (ready, ready[:1] * 2, (GroupId("9.9"),)):
        yield ev.BatchProposed(step_index=state.steps.chosen, groups=groups)


def _actor_joined(state: State, peer: str) -> Iterator[Event]:
    known = state.members.actors.get(peer)
    for name, role, boot in (
        (peer, known.role if known else "rollout", known.boot_id if known else "b"),
        (peer, known.role if known else "rollout", "another boot"),
        ("rollout-98", "rollout", "rollout-98/0"),
        ("trainer-9", "trainer", "trainer-9/0"),
        ("coordinator", "rollout", "c"),
        ("strategy", "rollout", "s"),
        ("rollout-97", "king", "k"),
    ):
        yield ev.ActorJoined(name=name, role=role, boot_id=boot, node="node-0", pid=1)


def _process_exited(state: State, peer: str) -> Iterator[Event]:
    named = [(actor.name, actor.boot_id) for actor in state.members.actors.values()]
    for name, boot in (("rollout-99", "b"), ("rollout-0", "an older boot"), *named):
        for restarting in (True, False):
            yield ev.ProcessExited(
                actor=ActorName(name), boot_id=boot, code=-9, restarting=restarting
            )


def _trajectories_ended(state: State, peer: str) -> Iterator[Event]:
    yield ev.TrajectoriesEnded(command_id=1, ended=())
    for outstanding in state.orders.commands.values():
        if isinstance(outstanding.command, cmd.EndTrajectories):
            rows = tuple(
                ev.EndedTrajectory(trajectory_id=e.trajectory_id, num_tokens=10, tokens_lost=0)
                for e in outstanding.command.endings
            )
            yield ev.TrajectoriesEnded(command_id=outstanding.command_id, ended=rows)
            yield ev.TrajectoriesEnded(command_id=outstanding.command_id, ended=())


def _step_completed(state: State, peer: str) -> Iterator[Event]:
    batch = state.steps.batch
    step, version = (
        (batch.step_index, batch.version) if batch else (state.steps.completed, state.versions.next)
    )
    for s, v in ((step, version), (step, version + 5), (step + 1, version), (step - 1, version)):
        yield step_completed(s, v)
    groups = [state.work.groups[g].members for g in batch.groups] if batch else []
    for rows in (groups[0][:1], groups[0]) if groups else ():
        yield step_completed(step, version, rows)


def _trainer_ready(state: State, peer: str) -> Iterator[Event]:
    """With the checkpoints of all steps that the log knows, with one that it does not, and none."""
    known = tuple(
        ev.Checkpoint(version=t.version, step=t.step_index + 1, path="c", digest=t.chain)
        for t in state.steps.trained
    )
    ahead = ev.Checkpoint(
        version=state.versions.next, step=state.steps.completed + 1, path="c", digest=""
    )
    for checkpoints in (known, (ahead,), ()):
        yield ev.TrainerReady(num_parameters=1, weights_bytes=4, checkpoints=checkpoints)


def _checkpoint_loaded(state: State, peer: str) -> Iterator[Event]:
    outstanding = state.orders.commands.get("load")
    command = outstanding.command if outstanding else None
    version = command.version if isinstance(command, cmd.LoadCheckpoint) else state.versions.newest
    for found in (version, version + 1):
        yield ev.CheckpointLoaded(version=found, step=state.steps.completed)


def _step_repeated(state: State, peer: str) -> Iterator[Event]:
    for step, digest in (
        (state.steps.repeated, "d"),
        (state.steps.repeated, "other bytes"),
        (state.steps.repeated + 1, ""),
    ):
        yield ev.StepRepeated(step_index=step, version=step + 1, digest=digest, published="d")


def _model_exported(state: State, peer: str) -> Iterator[Event]:
    for version in (state.versions.export, state.versions.next):
        yield ev.ModelExported(version=version, path="export")


def _weights_received(state: State, peer: str) -> Iterator[Event]:
    newest = state.versions.next - 1
    step = newest - 1 if newest == state.versions.export else newest
    for version, made_by, digest, duration_ms in (
        (newest, step, f"d{step}", 9_000),
        (newest, step, "other bytes", 1),
        (newest + 1, step + 1, "d", 1),
        (state.versions.newest, state.versions.newest_step, state.versions.newest_digest, 1),
        (newest, step, f"d{step}", -1),
    ):
        yield ev.WeightsReceived(
            version=version,
            step=made_by,
            digest=digest,
            kind="full",
            num_bytes=4,
            duration_ms=duration_ms,
            held=(version,),
        )


def _transfer_problem(state: State, peer: str) -> Iterator[Event]:
    for came, left in ((0, 0), (10, 90), (10, -1)):
        yield ev.TransferProblem(
            kind="slow", relay="", version=state.versions.newest, detail="", num_bytes=came,
            duration_ms=60_000, left_bytes=left,
        )  # fmt: skip


def _relay_linked(state: State, peer: str) -> Iterator[Event]:
    yield ev.RelayLinked(command_id=1, successor="")
    outstanding = state.orders.commands.get(f"forward:{peer}")
    if outstanding is not None:
        yield ev.RelayLinked(command_id=outstanding.command_id, successor="")


def _trajectories_released(state: State, peer: str) -> Iterator[Event]:
    yield ev.TrajectoriesReleased(command_id=1)
    outstanding = state.orders.commands.get(f"release:{peer}")
    if outstanding is not None:
        yield ev.TrajectoriesReleased(command_id=outstanding.command_id)


def _weights_published(state: State, peer: str) -> Iterator[Event]:
    newest = state.versions.next - 1
    step = newest - 1 if newest == state.versions.export else newest
    for version, made_by, digest in (
        (newest, step, f"d{step}"),
        (newest, step, "other bytes"),
        (newest, step - 1, "d"),
        (newest + 1, step + 1, "d"),
        (state.versions.newest, state.versions.newest_step, state.versions.newest_digest),
    ):
        yield ev.WeightsPublished(
            version=version, step=made_by, digest=digest, num_bytes=4, held=(version,)
        )


def _replica_ready(state: State, peer: str) -> Iterator[Event]:
    for capacity in (8, 0, -4, 1):
        yield ev.ReplicaReady(max_num_seqs=capacity, kv_capacity_tokens=100)


def _pulled(state: State, peer: str) -> int:
    """The version that this replica was told to pull, else the newest."""
    outstanding = state.orders.commands.get(f"pull:{peer}")
    command = outstanding.command if outstanding else None
    return command.version if isinstance(command, cmd.PullWeights) else state.versions.newest


def _weights_loaded(state: State, peer: str) -> Iterator[Event]:
    version = _pulled(state, peer)
    step = version - 1 if version == state.versions.export else version
    for v, s in ((version, step), (version, step + 1), (version - 1, step - 1), (version + 9, 0)):
        yield ev.WeightsLoaded(
            version=v, step=s, digest="d", probe_diff=0.0, seconds=0.1, reloaded=True
        )


def _version_missing(state: State, peer: str) -> Iterator[Event]:
    for held in ((state.versions.newest,), (), (state.versions.next + 3,)):
        yield ev.VersionMissing(version=_pulled(state, peer), held=held)


def _checkpoint_saved(state: State, peer: str) -> Iterator[Event]:
    newest = state.versions.next - 1
    step = newest - 1 if newest == state.versions.export else newest
    for version, made_by, kept in (
        (newest, step, (newest,)),
        (newest, step + 1, (newest,)),
        (newest, step, ()),
        (newest, step, (newest + 3,)),
    ):
        yield ev.CheckpointSaved(version=version, step=made_by, path="checkpoints/x", kept=kept)


_MAKERS: dict[type[Event], Callable[[State, str], Iterator[Event]]] = {
    ev.CoordinatorStarted: _coordinator_started,
    ev.TimerFired: _timer_fired,
    ev.BatchProposed: _batch_proposed,
    ev.ActorJoined: _actor_joined,
    ev.ProcessExited: _process_exited,
    ev.TrajectoriesEnded: _trajectories_ended,
    ev.StepCompleted: _step_completed,
    ev.ModelExported: _model_exported,
    ev.TrainerReady: _trainer_ready,
    ev.CheckpointLoaded: _checkpoint_loaded,
    ev.StepRepeated: _step_repeated,
    ev.CheckpointSaved: _checkpoint_saved,
    ev.WeightsPublished: _weights_published,
    ev.WeightsReceived: _weights_received,
    ev.RelayLinked: _relay_linked,
    ev.TransferProblem: _transfer_problem,
    ev.TrajectoriesReleased: _trajectories_released,
    ev.ReplicaReady: _replica_ready,
    ev.WeightsLoaded: _weights_loaded,
    ev.VersionMissing: _version_missing,
}
