"""laminar-node: the daemon of one machine; it runs this machine's actors.

    laminar-node RUN_DIR [--name node-0] [--roles store,relay,trainer,rollout:2]

Without --roles it runs everything, with as many replicas as rollout.replicas says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from laminar.actors.host import run_actor
from laminar.actors.node import Node
from laminar.config import ConfigError, load
from laminar.rundir import CONFIG_FILE

ROLES = ("store", "relay", "trainer", "rollout")


def main() -> None:
    parser = argparse.ArgumentParser(prog="laminar-node", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", default="node-0")
    parser.add_argument("--roles", default="")
    arguments = parser.parse_args()
    try:
        config = load([arguments.run_dir / CONFIG_FILE])
        default = f"store,relay,trainer,rollout:{config.rollout.replicas}"
        roles = parse_roles(arguments.roles or default)
    except ConfigError as error:
        print(f"laminar-node: {error}", file=sys.stderr)
        sys.exit(2)
    name = arguments.name
    sys.exit(run_actor(arguments.run_dir, name, "node", name, lambda host: Node(host, roles)))


def parse_roles(text: str) -> list[tuple[str, int]]:
    """ "relay,rollout:2" -> [("relay", 1), ("rollout", 2)]; raises ConfigError."""
    roles = []
    for part in text.split(","):
        role, _, count = part.partition(":")
        if role not in ROLES or not (count or "1").isdigit():
            raise ConfigError(
                f"--roles {text!r}: {part!r} is not one of {', '.join(ROLES)}, with :N for several"
            )
        roles.append((role, int(count or "1")))
    return roles


if __name__ == "__main__":
    main()
