"""Pinning: versions that relays keep for an evaluation, or evict last.

Reads   state.evaluations.running, replicas that run something, lost work
Writes  state.versions.unfinished
Emits   PinVersion

A version with unfinished work is needed again when a replica that has it is lost. Relays are
informed when a version is published, and when a replica has loaded one: then its work with an older
one has ended.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import State
from laminar.events import commands as cmd


def send_pins(ctx: Context) -> None:
    """Inform every relay of changes in the versions with unfinished work.

    The newest version is kept anyway."""
    state = ctx.state
    unfinished = sorted(v for v in _find_unfinished_versions(state) if v < state.versions.newest)
    if unfinished != state.versions.unfinished:
        state.versions.mark_unfinished(unfinished)
        for name in state.members.relays:
            send_pin(ctx, name)


def send_pin(ctx: Context, relay: str) -> None:
    """Send a relay the versions that it must keep."""
    state = ctx.state
    pinned = state.evaluations.running.version if state.evaluations.running is not None else -1
    ctx.issue_command(
        cmd.PinVersion(to=relay, version=pinned, unfinished=tuple(state.versions.unfinished))
    )


def _find_unfinished_versions(state: State) -> set[int]:
    if state.settings.in_flight:  # such work continues with any newer version
        return set()
    return {
        *indexes_of(state).replicas.list_busy_versions(),
        *indexes_of(state).lost.list_versions(),
    }
