"""Names of things, and the one hash that choices are made with.

A group is the n sibling trajectories of one prompt in one pass over the data: its id is
(pass, position), never the prompt, so that a second pass repeats neither the ids nor the random
numbers of the first. Ids are short readable strings, because they are read in raw log dumps far
more often than they are compared: group "0.17", its fourth sibling "0.17.3", group 5 of the
evaluation with index 2 "e2.5".
"""

from __future__ import annotations

from typing import NewType

import msgspec
import xxhash

GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
ActorName = NewType("ActorName", str)  #: "rollout-0", "relay-0", "trainer-0", "store-0", "node-0"
BootId = NewType("BootId", str)  #: random name of one process start, before it has an incarnation

TRAIN = "train"
EVAL = "eval"

_encode = msgspec.msgpack.Encoder().encode


def train_group(pass_index: int, position: int) -> GroupId:
    return GroupId(f"{pass_index}.{position}")


def eval_group(evaluation: int, position: int) -> GroupId:
    return GroupId(f"e{evaluation}.{position}")


def trajectory(group: GroupId, sibling: int) -> TrajectoryId:
    return TrajectoryId(f"{group}.{sibling}")


def group_of(trajectory_id: TrajectoryId) -> GroupId:
    return GroupId(trajectory_id.rpartition(".")[0])


def sibling_of(trajectory_id: TrajectoryId) -> int:
    return int(trajectory_id.rpartition(".")[2])


def hash64(*parts: int | str) -> int:
    """xxh3_64 of the MessagePack array of `parts`: the same on every machine and Python."""
    return xxhash.xxh3_64_intdigest(_encode(parts))


def trajectory_seed(run_seed: int, group: GroupId, sibling: int, attempt: int) -> int:
    """uint64 seed of one attempt; a retry draws other random numbers than the attempt before it."""
    return hash64(run_seed, "trajectory", group, sibling, attempt)
