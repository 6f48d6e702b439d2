"""Names of things, and the one hash behind every pseudo-random choice.

A group is the n sibling trajectories of one prompt in one pass over the data: its id is
(pass, position), never the prompt, so that a second pass repeats neither the ids nor the random
numbers of the first. Ids are short readable strings, because they are read in raw log dumps far
more often than they are compared: group "0.17", its fourth sibling "0.17.3", group 5 of the
evaluation with index 2 "e2.5".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NewType

import msgspec
import xxhash

from laminar.names.roles import ROLE_TABLE, Place, Role

GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
ActorName = NewType("ActorName", str)  #: "rollout-0", "relay-0", "trainer-0", "store-0", "node-0"
BootId = NewType("BootId", str)  #: random name of one process start, before it has an incarnation

_NODE_NAME = re.compile(r"(?:trainer-)?node-(0|[1-9][0-9]{0,5})")


class Purpose(StrEnum):
    """The purpose of a trajectory."""

    TRAIN = "train"
    EVAL = "eval"


_encode = msgspec.msgpack.Encoder().encode


def train_group(pass_index: int, position: int) -> GroupId:
    return GroupId(f"{pass_index}.{position}")


def eval_group(evaluation: int, position: int) -> GroupId:
    return GroupId(f"e{evaluation}.{position}")


def make_trajectory_id(group: GroupId, sibling: int) -> TrajectoryId:
    return TrajectoryId(f"{group}.{sibling}")


def node_index(node: str) -> int:
    """Return the number of a machine, "node-3" -> 3; raise ValueError for any other name."""
    match = _NODE_NAME.fullmatch(node)
    if match is None or node == trainer_node(0):
        raise ValueError(
            f"{node!r} is not a node name: use node-0, node-1, ..., or {trainer_node(1)}, ..."
        )
    return int(match[1])


def trainer_node(number: int) -> str:
    """Return the name of a machine with ranks of the trainer alone, numbered from 1."""
    return f"trainer-node-{number}"


def is_trainer_node(node: str) -> bool:
    return node.startswith("trainer-")


def actor_name(role: str, node: str, index: int) -> ActorName:
    """Return the name of a process of a machine, unique in the run without coordination.

    A role of which a machine has one is numbered like the machine. Replicas of the first machine
    are "rollout-0", "rollout-1", ..., those of machine 3 "rollout-3.0", "rollout-3.1", ..."""
    machine = node_index(node)
    if role == Role.NODE:
        return ActorName(node)
    if ROLE_TABLE[role].place != Place.SEVERAL:
        return ActorName(f"{role}-{machine}")
    return ActorName(f"{role}-{machine}.{index}" if machine else f"{role}-{index}")


def hash64(*parts: int | str) -> int:
    """Return xxh3_64 of the MessagePack array of `parts`: the same on every machine and Python."""
    return xxhash.xxh3_64_intdigest(_encode(parts))


def hash_batch(batch: Sequence[str]) -> str:
    """Return xxh3_128 (hex) of the MessagePack array of the ids of a batch, in order."""
    return xxhash.xxh3_128_hexdigest(_encode(batch))


def extend_chain_digest(before: str, *batches: Sequence[str]) -> str:
    """Return the chained digest of all batches; `before` covers the earlier ones (empty: none)."""
    for batch in batches:
        before = xxhash.xxh3_128_hexdigest(_encode((before, hash_batch(batch))))
    return before


def trajectory_seed(run_seed: int, group: GroupId, sibling: int, attempt: int) -> int:
    """Return the uint64 seed of one attempt; a retry draws other random numbers than before."""
    return hash64(run_seed, "trajectory", group, sibling, attempt)
