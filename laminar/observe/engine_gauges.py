"""Latest reports of the replicas' engines, for people only, never for decisions.

Reads   TokenProgress and ReplicaReady, as the coordinator applies them; commands as it decides them
Gives   LatestGauges: of each replica, for status.json; StepGauges: figures over the reports since
        the previous step, for metrics.jsonl; RepackCounts, for both

StepGauges resets with each step, so a coordinator that replays its log from any step writes the
same figures as one that has seen all events.
"""

from __future__ import annotations

from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped


class LatestGauges:
    """The last report of each replica's present process."""

    def __init__(self) -> None:
        self.reports: dict[str, dict[str, int]] = {}  #: by replica, once there is one

    def record_event(self, stamped: Stamped, state: State) -> None:
        if isinstance(stamped.event, ev.ReplicaReady):
            self.reports.pop(stamped.peer, None)
        elif (report := _get_report(stamped, state)) is not None:
            self.reports[stamped.peer] = {
                "kv_used_tokens": report.kv_used_tokens,
                "kv_capacity_tokens": report.kv_capacity_tokens,
                "running": report.running,
                "waiting": report.waiting,
                "preempted": report.preempted,
                "prefix_cache_queries": report.prefix_cache_queries,
                "prefix_cache_hits": report.prefix_cache_hits,
            }


class StepGauges:
    """Means over the reports since the previous step, and the growth of each replica's counters."""

    def __init__(self) -> None:
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._reports = self._running = self._waiting = 0
        self._shares, self._share_sum, self._share_max = 0, 0.0, 0.0
        self._first: dict[tuple[str, int], ev.TokenProgress] = {}
        self._last: dict[tuple[str, int], ev.TokenProgress] = {}

    def record_event(self, stamped: Stamped, state: State) -> None:
        if (report := _get_report(stamped, state)) is None:
            return
        life = stamped.peer, stamped.incarnation
        self._first.setdefault(life, report)
        self._last[life] = report
        self._reports += 1
        self._running += report.running
        self._waiting += report.waiting
        if report.kv_capacity_tokens:
            share = report.kv_used_tokens / report.kv_capacity_tokens
            self._shares += 1
            self._share_sum += share
            self._share_max = max(self._share_max, share)

    def drain_figures(self) -> dict[str, float]:
        """Return the figures of a step, without those that have no data, and reset."""
        figures: dict[str, float] = {}
        if self._reports:
            figures["rollout/running/mean"] = self._running / self._reports
            figures["rollout/waiting/mean"] = self._waiting / self._reports
            figures["rollout/preempted"] = self._sum_growth("preempted")
        if self._shares:
            figures["rollout/kv_used_share/mean"] = self._share_sum / self._shares
            figures["rollout/kv_used_share/max"] = self._share_max
        if queries := self._sum_growth("prefix_cache_queries"):
            figures["rollout/prefix_cache_hit_share"] = (
                self._sum_growth("prefix_cache_hits") / queries
            )
        self._reset_counts()
        return figures

    def _sum_growth(self, name: str) -> int:
        pairs = ((self._first[life], last) for life, last in self._last.items())
        return sum(getattr(last, name) - getattr(first, name) for first, last in pairs)


def _get_report(stamped: Stamped, state: State) -> ev.TokenProgress | None:
    """Return the report of a serving replica; None for a former process of its name."""
    event, replica = stamped.event, stamped.peer
    if not isinstance(event, ev.TokenProgress) or replica not in state.members.replicas:
        return None
    return event if state.members.actors[replica].incarnation == stamped.incarnation else None


class RepackCounts:
    """Counts of replicas emptied and trajectories migrated, from the first event seen.

    Always 0 if the run has no repack.
    """

    def __init__(self) -> None:
        self.emptied = self.moves = 0

    def record_commands(self, commands: list[Command], state: State) -> None:
        if not state.settings.repack_policy:
            return
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self.emptied += 1
            elif isinstance(command, cmd.GenerateTrajectory):
                progress = state.repack.progress.get(command.trajectory_id)
                self.moves += progress is not None and bool(progress.source)

    def drain_figures(self) -> dict[str, float]:
        """Return the figures of a step and reset."""
        found = {"repack/emptied": float(self.emptied), "repack/moves": float(self.moves)}
        self.emptied = self.moves = 0
        return found
