"""The index of replicas: versions served, load, empty replicas, and those with old weights.

Reads   replicas, whether their processes live, what their relays have
Gives   ReplicaIndex (`indexes_of(state).replicas`): queries over all replicas

Part of the indexes: it follows from the state; code that changes a replica calls `update`. Replicas
of one kind differ in their load only, and there are few kinds, so no query iterates over all
replicas. Numbers give them the order of `state.members.replicas`, which breaks ties."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import Any, NamedTuple

from laminar.core.state.members import Replica
from laminar.core.state.state import State


class Kind(NamedTuple):
    """The properties of a live replica, except its load, that decisions depend on."""

    version: int  #: loaded, or before the load that is under way; -1: none
    step: int
    loading: bool
    behind: bool  #: the relay of its machine has a newer version
    satisfied: bool  #: whether it took its share of new groups
    failed_loads: int
    emptied: bool  #: whether it gives away its work

    @property
    def serving(self) -> bool:
        return self.version >= 0 and not self.loading and not self.emptied


Load = tuple[int, int]  #: trajectories running or expected there, and capacity
_Loads = dict[Load, list[int]]  #: numbers of replicas, ascending


def _get_load(replica: Replica) -> Load:
    return replica.load, replica.capacity


class ReplicaIndex:
    """Live replicas by kind and load."""

    def __init__(self, state: State) -> None:
        self.kinds: dict[Kind, _Loads] = {}
        #: number of replicas with room of each serving kind, by version
        self._able: dict[int, dict[Kind, int]] = {}
        self.numbers: dict[str, int] = {}  #: numbers by name; later replicas have higher ones
        self.replicas: dict[int, Replica] = {}
        self.filed: dict[str, tuple[Kind, Load]] = {}  #: kind and load of live replicas, by name
        self._count = count()
        for replica in state.members.replicas.values():
            self.add(state, replica)

    # --- updates ----------------------------------------------------------------------------------

    def add(self, state: State, replica: Replica) -> None:
        """Add a replica after all others."""
        number = self.numbers[replica.name] = next(self._count)
        self.replicas[number] = replica
        self.update(state, replica)

    def remove(self, replica: Replica) -> None:
        self._refile_replica(replica.name, None)
        del self.replicas[self.numbers.pop(replica.name)]

    def update(self, state: State, replica: Replica) -> None:
        """Refile a replica after any change."""
        actor = state.members.actors.get(replica.name)
        if actor is None or not actor.alive:
            return self._refile_replica(replica.name, None)
        relay = state.members.relays.get(replica.relay)
        kind = Kind(
            replica.version,
            replica.step,
            replica.loading,
            relay is not None and relay.newest > replica.version,
            0 < state.settings.groups_per_version <= replica.groups_taken,
            replica.failed_loads,
            bool(replica.outgoing),
        )
        self._refile_replica(replica.name, (kind, _get_load(replica)))

    def update_load(self, replica: Replica) -> None:
        """Refile a replica after a change in load only."""
        filed = self.filed.get(replica.name)
        if filed is not None:
            self._refile_replica(replica.name, (filed[0], _get_load(replica)))

    def _refile_replica(self, name: str, filed: tuple[Kind, Load] | None) -> None:
        before = self.filed.get(name)
        if before == filed:
            return
        number = self.numbers[name]
        if before is not None:
            self._remove_entry(*before, number)
            del self.filed[name]
        if filed is not None:
            self.filed[name] = filed
            self._put_in(*filed, number)

    def _put_in(self, kind: Kind, load: Load, number: int) -> None:
        loads = self.kinds.get(kind)
        if loads is None:
            loads = self.kinds[kind] = {}
        if load in loads:
            insort(loads[load], number)
        else:
            loads[load] = [number]
        if load[0] < load[1] and kind.serving:
            able = self._able.setdefault(kind.version, {})
            able[kind] = able.get(kind, 0) + 1

    def _remove_entry(self, kind: Kind, load: Load, number: int) -> None:
        if load[0] < load[1] and kind.serving:
            self._decrement_able(kind)
        loads = self.kinds[kind]
        numbers = loads[load]
        if len(numbers) > 1:
            del numbers[bisect_left(numbers, number)]
            return
        del loads[load]
        if not loads:
            del self.kinds[kind]

    def to_comparable(self) -> Any:
        """Return a value that is equal for indexes with equal contents."""
        names = {number: replica.name for number, replica in self.replicas.items()}
        order = [names[number] for number in sorted(names)]
        filed = {
            kind: {load: [names[n] for n in numbers] for load, numbers in loads.items()}
            for kind, loads in self.kinds.items()
        }
        return order, filed, self._able

    def _decrement_able(self, kind: Kind) -> None:
        able = self._able[kind.version]
        able[kind] -= 1
        if not able[kind]:
            del able[kind]
            if not able:
                del self._able[kind.version]

    # --- queries ----------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self.filed)

    def get_kind(self, name: str) -> Kind | None:
        """Return the kind of a replica; None if its process is gone."""
        filed = self.filed.get(name)
        return filed[0] if filed is not None else None

    def filter_kinds(self, wanted: Callable[[Kind], bool]) -> list[Kind]:
        """Return the existing kinds that `wanted` accepts."""
        return [kind for kind in self.kinds if wanted(kind)]

    def find_able_kinds(self, version: int) -> Collection[Kind]:
        """Return kinds that serve this version, of which some replica has room."""
        return self._able.get(version, ())

    def able_from(self, version: int) -> list[Kind]:
        """Return kinds that serve this version or a newer one, of which some replica has room."""
        return [kind for v, kinds in self._able.items() if v >= version for kind in kinds]

    def newest_able(self) -> int:
        """Return the highest version that a replica with room serves; -1: none."""
        return max(self._able, default=-1)

    def find_least_loaded(
        self, kinds: Collection[Kind], room: int, but: Collection[str] = ()
    ) -> Replica | None:
        """Return the least loaded replica of these kinds with `room`, the first of equals."""
        best: tuple[int, int] | None = None
        for kind in kinds:
            for (running, capacity), numbers in self.kinds.get(kind, {}).items():
                if capacity - running >= room and (best is None or running <= best[0]):
                    first = self._find_lowest(numbers, but)
                    if first >= 0 and (best is None or (running, first) < best):
                        best = running, first
        return self.replicas[best[1]] if best is not None else None

    def _find_lowest(self, numbers: list[int], but: Collection[str]) -> int:
        """Return the lowest number, -1 for none; `but` names excluded replicas."""
        if not but:
            return numbers[0]
        return next((n for n in numbers if self.replicas[n].name not in but), -1)

    def iter_empty(self, kinds: Collection[Kind]) -> Iterator[int]:
        """Yield numbers of the replicas of these kinds that run nothing."""
        for kind in kinds:
            for (running, _), numbers in self.kinds[kind].items():
                if not running:
                    yield from numbers

    def list_busy_versions(self) -> set[int]:
        """Return versions with which some replica runs something."""
        return {
            kind.version
            for kind, loads in self.kinds.items()
            if any(running for running, _ in loads)
        }

    def iter_numbers(self, kinds: Collection[Kind]) -> Iterator[int]:
        """Yield numbers of all replicas of these kinds."""
        for kind in kinds:
            for numbers in self.kinds[kind].values():
                yield from numbers

    def with_room(self, kinds: Collection[Kind]) -> Iterator[int]:
        """Yield numbers of the replicas of these kinds that can run more."""
        for kind in kinds:
            for (running, capacity), numbers in self.kinds[kind].items():
                if running < capacity:
                    yield from numbers
