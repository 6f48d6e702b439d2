"""Roles of the processes of a run: the only list of them.

Reads   nothing
Gives   Role; ACTOR_ROLES, the roles of processes that join a run

An actor's role is part of its name ("rollout-3") and of its join message. Each event declares which
roles may report it, and each command which roles carry it out (events/).
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """A role: it reports events or carries out commands."""

    COORDINATOR = "coordinator"
    STRATEGY = "strategy"  #: the coordinator's worker process for a user's batch strategy
    NODE = "node"
    STORE = "store"
    TRAINER = "trainer"
    RELAY = "relay"
    ROLLOUT = "rollout"


ACTOR_ROLES = (Role.NODE, Role.STORE, Role.TRAINER, Role.RELAY, Role.ROLLOUT)
