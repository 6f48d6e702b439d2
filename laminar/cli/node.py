"""laminar-node: the daemon of one machine; it runs this machine's actors.

    laminar-node RUN_DIR [--name node-0] [--roles store,relay,trainer,rollout:2] [--host IP]

Without --roles it runs what the config gives to its name: node-0 has everything, node-3 a relay and
replicas, trainer-node-1 ranks of the trainer. --host is the address, the name
or the interface of this machine by which the others reach it; the default is the address on the way
to the coordinator. SIGTERM, SIGHUP and Ctrl-C end it and its actors gracefully; the run continues
without this machine if it can.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from laminar.actors.host import Host
from laminar.actors.node import Node
from laminar.actors.system.process import run_actors
from laminar.actors.system.processes import MachineProcesses
from laminar.cli.arguments import CommandParser
from laminar.config import Config, ConfigError
from laminar.launch.exit_handling import exit_code, print_error
from laminar.names import exit_codes, ids
from laminar.names.roles import NODE_ROLES, ROLE_TABLE, Place, Role
from laminar.net.addresses import own_ip, route_to
from laminar.net.client import coordinator_address
from laminar.net.session import RunOver
from laminar.observe.hardware import describe_hardware
from laminar.run.child_process import Spawned
from laminar.run.directory import COORDINATOR_FILE, run_config
from laminar.run.lock import RunLock
from laminar.run.permissions import check_private
from laminar.run.stop_requests import add_child_option

POLL_S = 0.2


def main() -> None:
    sys.exit(exit_code("laminar-node", run_node, daemon=True))


def run_node(words: Sequence[str] | None = None, seeds: Mapping[str, Spawned] | None = None) -> int:
    """Run a node until it has ended; `seeds`: warm processes that it takes over, by kind."""
    parser = CommandParser(prog="laminar-node", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--name", default="node-0")
    parser.add_argument("--roles", default="")
    parser.add_argument("--host", default="")
    add_child_option(parser)
    arguments = parser.parse_args(words)
    config = run_config(arguments.run_dir)
    if arguments.lock_fd is None:
        check_private(arguments.run_dir)
    roles = parse_roles(arguments.roles) if arguments.roles else None
    roles = choose_roles(arguments.name, roles, config)
    try:
        address = host_of(arguments.run_dir, config, arguments.host)
    except RunOver:
        print_error(arguments.name, f"the run {arguments.run_dir} is over")
        return exit_codes.COMPLETE
    lock = RunLock.inherit(arguments.run_dir, arguments.name, arguments.lock_fd)
    name = arguments.name

    def make(host: Host) -> Node:
        host.log.info("machine", **describe_hardware())
        return Node(host, roles, MachineProcesses(host, lock, roles, seeds))

    return run_actors(lock, [name], "node", name, address, make)


def host_of(run_dir: Path, config: Config, asked: str) -> str:
    """Return the address on which the servers of this machine listen.

    Waits for the coordinator's address if it decides; raises RunOver if the run is over.
    """
    file = run_dir / COORDINATOR_FILE
    coordinator = coordinator_address(file)
    if asked:
        return own_ip(asked, "--host")
    deadline = time.monotonic() + config.coordinator.start_timeout_s
    while coordinator is None:
        if config.coordinator.host in ("localhost", "127.0.0.1"):
            return "127.0.0.1"
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{file} does not exist, and this machine's address depends on the coordinator's: "
                "start laminar-coord, or give --host"
            )
        time.sleep(POLL_S)
        coordinator = coordinator_address(file)
    return _find_route(coordinator, config.coordinator.node_lease_ms / 1000)


def _find_route(coordinator: str, limit_s: float) -> str:
    """Return the address that routes to the coordinator, for which a cut-off machine waits."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return route_to(coordinator)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def choose_roles(
    name: str, asked: list[tuple[str, int]] | None, config: Config
) -> list[tuple[str, int]]:
    """Return the roles of a node; raise ConfigError for a name or a role that it cannot have."""
    try:
        ids.node_index(name)
    except ValueError as error:
        raise ConfigError(f"--name: {error}") from None
    if ids.is_trainer_node(name) and config.trainer.nodes == 1:
        raise ConfigError(f"--name {name}: trainer.nodes = 1, so all ranks are on node-0")
    roles = asked or config.processes_on(name)
    check_roles(name, roles)
    return roles


def check_roles(name: str, roles: list[tuple[str, int]]) -> None:
    """Raise ConfigError for a role that this machine cannot have."""
    first = name == "node-0"
    for role, count in roles:
        if (role == Role.RANKS) != ids.is_trainer_node(name):
            where = f"{ids.trainer_node(1)}, ... have ranks, and nothing else"
            raise ConfigError(f"--roles: {name} cannot have {role}: {where}")
        if count > 1 and ROLE_TABLE[role].place != Place.SEVERAL:
            ranks = "; trainer.ranks says how many processes it has" * (role == Role.TRAINER)
            raise ConfigError(f"--roles: a machine has one {role}, not {count}{ranks}")
        if ROLE_TABLE[role].place == Place.FIRST and not first:
            ranks = ", with all of its trainer.ranks" * (role == Role.TRAINER)
            raise ConfigError(f"--roles: the {role} of a run is on node-0{ranks}, not on {name}")


def parse_roles(text: str) -> list[tuple[str, int]]:
    """Parse "relay,rollout:2" to [("relay", 1), ("rollout", 2)]; raise ConfigError."""
    roles = []
    for part in text.split(","):
        role, _, count = part.partition(":")
        if role not in NODE_ROLES or not (count or "1").isdigit():
            raise ConfigError(
                f"--roles {text!r}: {part!r} is not one of {', '.join(NODE_ROLES)}, with :N for "
                "several"
            )
        roles.append((role, int(count or "1")))
    return roles


if __name__ == "__main__":
    main()
