"""Members: the processes that have joined, with the replicas and relays among them.

Reads   nothing
Gives   Members and its parts ActorState, Replica, RelayState
"""

from __future__ import annotations

import msgspec

from laminar.core.state.migrations import RepackState
from laminar.names.ids import TrajectoryId
from laminar.names.roles import Role


class ActorState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A process slot by name; a restarted process gets a higher incarnation."""

    name: str
    role: Role
    node: str
    pid: int
    boot_id: str
    incarnation: int
    alive: bool = True
    ready: bool = False
    silent: bool = False  #: whether a node is silent while its actors respond
    job: str = ""  #: batch-system job that started it; empty: none
    job_restarts: int = 0
    last_peer_seq: int = 0  #: last message number: deduplicates after a coordinator restart
    #: failure of the previous process's engine, if it never had weights
    start_failure: str = ""


class Replica(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An inference engine, which serves one weight version at a time."""

    name: str
    relay: str  #: name of the relay of its machine, whether it exists or not
    capacity: int  #: trajectories it runs at a time
    version: int = -1  #: loaded; -1 before the first load
    step: int = -1  #: the step that made the loaded version
    digest: str = ""
    groups_taken: int = 0  #: new groups since the load
    loading: bool = False
    #: generating here, each with its placement (also in state.trajectories)
    running: dict[TrajectoryId, int] = {}
    tokens_total: int = 0
    progress_ns: int = 0  #: time when it last sampled, loaded or took work
    failed_loads: int = 0
    repack: RepackState | None = None  #: repack's view; None without repack

    @property
    def outgoing(self) -> dict[TrajectoryId, None]:
        return self.repack.outgoing if self.repack is not None else {}

    @property
    def incoming(self) -> dict[TrajectoryId, None]:
        return self.repack.incoming if self.repack is not None else {}

    @property
    def load(self) -> int:
        """Trajectories that run here, or for which room is reserved."""
        return len(self.running) + len(self.incoming)


class RelayState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A ready relay of one machine: a place in the chain."""

    name: str
    node: str
    chain_address: str  #: host:port for the relay before it
    incarnation: int
    ready_seq: int  #: seq of its ready event
    successor: str = ""  #: relay that it is ordered to feed; empty: none
    held: list[int] = []  #: versions that can be pulled here, ascending
    newest: int = -1  #: highest version that it has reported
    newest_digest: str = ""
    arrived: dict[int, int] = {}  #: time_ns of its report, by held version
    slow_transfers: int = 0  #: transfers in a row that its hop held up
    failed_links: int = 0  #: successors in a row that it could not connect to, or feed


class Members(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The processes of a run."""

    coordinator_incarnation: int = 0
    next_incarnation: int = 1
    #: processes by name; role "rollout" has an entry in replicas once it is ready
    actors: dict[str, ActorState] = {}
    #: last boot ids of earlier node processes, by node name
    former_boot_ids: dict[str, tuple[str, ...]] = {}
    #: start number of the last member, by name
    start_numbers: dict[str, int] = {}
    replicas: dict[str, Replica] = {}
    #: relays that are ready, by name
    relays: dict[str, RelayState] = {}
    #: names of relays in the order in which weights pass through them
    relay_chain: list[str] = []

    def is_actor_alive(self, name: str) -> bool:
        actor = self.actors.get(name)
        return actor is not None and actor.alive

    def live_replicas(self) -> list[Replica]:
        return [r for r in self.replicas.values() if self.is_actor_alive(r.name)]

    def newest_for(self, replica: Replica) -> int:
        """Return the newest version that this replica can pull; -1: none."""
        relay = self.relays.get(replica.relay)
        return -1 if relay is None else relay.newest

    def list_held_versions(self, replica: Replica) -> list[int]:
        """Return all versions that this replica can pull from its relay."""
        relay = self.relays.get(replica.relay)
        return [] if relay is None else relay.held
