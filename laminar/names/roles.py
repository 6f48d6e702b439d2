"""Who takes part in a run: the one list of roles.

Reads   nothing
Gives   Role; ACTOR_ROLES, the roles of processes that join a run

An actor's role is part of its name ("rollout-3") and of what it says when it joins; which events a
role may report and which commands it carries out is declared beside each (events/).
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """A role: it reports events or carries out commands."""

    COORDINATOR = "coordinator"
    STRATEGY = "strategy"  #: the coordinator's own worker process for a user's batch strategy
    NODE = "node"
    STORE = "store"
    TRAINER = "trainer"
    RELAY = "relay"
    ROLLOUT = "rollout"


ACTOR_ROLES = (Role.NODE, Role.STORE, Role.TRAINER, Role.RELAY, Role.ROLLOUT)
