"""Every legal move of a trajectory, in one table.

Reads   a trajectory's status and what happened to it
Writes  trajectory.status; a move that is not in the table changes nothing and is counted

    dispatched  the command is on its way, nothing is known to be generated
    running     the engine has it
    generated   every token is durable, the reward is missing
    rewarded    waits for its siblings and for a batch
    lost        its replica is gone; it needs a new placement
    ending      its end is decided and on its way to the store
"""

from __future__ import annotations

from laminar.core.state import Trajectory

DISPATCHED, RUNNING, GENERATED, REWARDED, LOST, ENDING = (
    "dispatched",
    "running",
    "generated",
    "rewarded",
    "lost",
    "ending",
)

TRAJECTORY_MOVES: dict[tuple[str, str], str] = {
    (DISPATCHED, "started"): RUNNING,
    (DISPATCHED, "finished"): GENERATED,  # it had been generated before its replica died
    (RUNNING, "finished"): GENERATED,
    (GENERATED, "rewarded"): REWARDED,
    (DISPATCHED, "lose"): LOST,
    (RUNNING, "lose"): LOST,
    (LOST, "dispatch"): DISPATCHED,
    (DISPATCHED, "end"): ENDING,
    (RUNNING, "end"): ENDING,
    (GENERATED, "end"): ENDING,
    (REWARDED, "end"): ENDING,
    (LOST, "end"): ENDING,
}

IN_ENGINE = (DISPATCHED, RUNNING)
UNFINISHED = (DISPATCHED, RUNNING, GENERATED, LOST)


def move(trajectory: Trajectory, trigger: str) -> bool:
    """Make the move if the table has it; False (and no change) otherwise."""
    target = TRAJECTORY_MOVES.get((trajectory.status, trigger))
    if target is None:
        return False
    trajectory.status = target
    return True
