"""Export of a run as a trace for ui.perfetto.dev and chrome://tracing.

Reads   the event log of a run directory, by replay; timeline/, the processes' own records
Writes  one JSON file, as a stream, renamed once it is complete
Raises  ConfigError for a file that cannot be written

Trajectories lie on the slots of their replica, versions on the relay, steps and publishes on the
trainer, phases, evaluations and lost work on the coordinator. Both ends of an arrow belong to one
event: a publish leads from the trainer's work to the version, a pull from the version to the
replica, a move (repack: work given away) from one placement to the next. Spans open at the end of
the log are closed there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import msgspec

from laminar.analysis.export.perfetto_tracks import FLAGS, Span, Tracks
from laminar.analysis.facts.trajectory_history import (
    Change,
    EventClock,
    HistoryTracker,
    Moment,
    Placement,
    Stage,
    TrajectoryHistory,
)
from laminar.analysis.log.display import step_number
from laminar.analysis.log.run_log import replay_log
from laminar.analysis.log.timeline import read_spans
from laminar.analysis.report.repack_book import was_given_away
from laminar.analysis.why.idle_spells import DOWN, PULLING, IdleTracker
from laminar.config import ConfigError
from laminar.core.state.keys import CommandKey
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped, get_tag
from laminar.run.renames import get_temp_path, rename

PHASE, EVALUATION, LOST_WORK, WORK, PUBLISHING = (
    "phase", "evaluation", "lost work", "work", "publishing",
)  # fmt: skip
VERSION, PULL, REFUSED, MIGRATION, SLOT, REWARD, OWN = (
    "version", "pull", "refused", "migration", "slot", "reward", "own record",
)  # fmt: skip
KINDS = (
    PHASE, EVALUATION, LOST_WORK, FLAGS, WORK, PUBLISHING,
    VERSION, PULL, REFUSED, MIGRATION, SLOT, REWARD, OWN,
)  # fmt: skip
"""Tracks of a process, from top to bottom."""

ROLES = (COORDINATOR, "trainer", "relay", "rollout", "store", "node")  #: first, in this order

#: Rare events that explain others.
NOTABLE_EVENTS = (
    ev.CoordinatorStarted,
    ev.TimerFired,
    ev.HeartbeatLost,
    ev.NodeSilent,
    ev.NodeRecovered,
    ev.DrainRequested,
    ev.BatchProposed,
    ev.ActorJoined,
    ev.ActorLeft,
    ev.ActorFailed,
    ev.ProcessExited,
    ev.PublishSkipped,
    ev.TransferProblem,
    ev.WeightsRejected,
    ev.VersionMissing,
    ev.TrajectoryFailed,
)
#: Events and commands that only begin or end trajectories.
FREQUENT_EVENTS = (
    ev.TokenProgress,
    ev.TrajectoryStarted,
    ev.TrajectoryFinished,
    ev.TrajectoryRewarded,
)


def write_trace(run_dir: Path, path: Path) -> int:
    """Replay the run into a trace file; return the number of trace events."""
    new = get_temp_path(path)
    try:
        with open(new, "w") as file:
            count = _write(run_dir, file)
        rename(new, path, durable=False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        new.unlink(missing_ok=True)
    return count


def _write(run_dir: Path, file: TextIO) -> int:
    count = 0

    def emit(event: dict[str, Any]) -> None:
        nonlocal count
        file.write(",\n" if count else '{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(json.dumps(event, separators=(",", ":")))
        count += 1

    trace = TraceWriter(Tracks(emit, KINDS, _rank_process))
    replay_log(run_dir, trace)
    trace.finish(run_dir)
    file.write("\n]}\n")
    return count


def _rank_process(process: str) -> int:
    """Return a process's sort key: role, machine, number; rollout-3.0 is on machine 3 (from 0)."""
    role, _, place = process.rpartition("-")
    machine, _, number = place.rpartition(".")
    order = (*ROLES, role or process).index(role or process)
    return (order << 40) + (int(machine or 0) << 20) + (int(number) if role else 0)


class TraceWriter:
    """Replay observer that writes the trace; call `finish` at the end."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._moments, self._lives, self._idleness = EventClock(), HistoryTracker(), IdleTracker()
        self._actors: dict[str, None] = {}
        self._phase = ""
        self._evaluation: Span | None = None
        self._held: dict[str, list[int]] = {}  #: versions by relay
        self._orders: dict[Span, CommandKey] = {}  #: open work and pulls, by key of the command
        self._publishing: dict[int, Span] = {}  #: by version
        self._scoring: dict[str, Span] = {}  #: by trajectory
        self._refused: dict[str, str] = {}  #: reason by replica
        self._engines = EngineTracks(tracks)

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now, event = self._moments.locate_event(stamped), stamped.event
        us = self._to_us(now.unix_ns)
        if isinstance(event, NOTABLE_EVENTS):
            self._actors.setdefault(stamped.peer)
            self._tracks.add_instant(
                stamped.peer, us, get_tag(event), event=now.seq, **_select_fields(event)
            )
        for change in self._lives.record_event(now, event, commands, state):
            self._trace_change(change, now, us, was_given_away(stamped))
        self._engines.record_event(stamped, us, commands, state)
        if not isinstance(event, FREQUENT_EVENTS) or commands:
            self._trace_work(stamped, us, commands, state)
            self._trace_coordinator(now, us, state)
        self._trace_refusals(stamped, now, us, state)

    def finish(self, run_dir: Path) -> None:
        """Close open spans, and add those that the processes recorded."""
        self._tracks.close_all(self._to_us(self._moments.now.unix_ns), open_at_the_end=True)
        for name in self._actors:
            spans = [s for s in read_spans(run_dir, name) if s.state != "waiting"]
            for span in sorted(spans, key=lambda s: s.start_ns):
                length_us = (span.end_ns - span.start_ns) / 1e3
                self._tracks.add_span(name, OWN, self._to_us(span.start_ns), length_us, span.state)

    def _to_us(self, unix_ns: int) -> float:
        return (unix_ns - self._moments.first_ns) / 1e3

    # --- trajectories ---------------------------------------------------------------------------

    def _trace_change(self, change: Change, now: Moment, us: float, given: bool) -> None:
        what, life = change
        slot = _slot_span(life, life.placement)
        if what == Stage.DISPATCHED:
            self._trace_dispatch(life, now, us, given)
        elif what == Stage.STARTED:
            resumed = life.placement.tokens_resumed
            self._tracks.begin_inner(slot, us, "generating", event=now.seq, tokens_resumed=resumed)
        elif what == Stage.UPDATED:
            _, version = life.placement.updates[-1]
            self._tracks.begin_inner(slot, us, f"continues with v{version}", event=now.seq)
        elif what == Stage.FINISHED:
            facts = {"tokens": life.num_tokens, "finish_reason": life.finish_reason}
            self._tracks.end_span(slot, us, event=now.seq, **facts)
        elif what == Stage.LOST:
            self._trace_loss(life, now, us)
        elif what == Stage.SCORING:
            self._end_scoring(life, us, scored_elsewhere=True)
            span = self._scoring[life.trajectory_id] = (life.scorer, REWARD, life.trajectory_id)
            self._tracks.begin_span(span, us, life.trajectory_id, event=now.seq)
        elif what == Stage.REWARDED:
            self._end_scoring(life, us, event=now.seq, reward=life.reward)
        elif what == Stage.ENDING:
            facts = {"end": life.end, "reason": life.end_reason}
            self._tracks.end_span(slot, us, event=now.seq, **facts)
            self._tracks.end_span(_lost_span(life), us, event=now.seq, **facts)
            self._end_scoring(life, us, event=now.seq, **facts)

    def _trace_dispatch(self, life: TrajectoryHistory, now: Moment, us: float, given: bool) -> None:
        placement = life.placement
        span, lost = _slot_span(life, placement), _lost_span(life)
        facts = {
            "event": now.seq,
            "purpose": life.purpose,
            "version": placement.version,
            "placement": placement.number,
            "attempt": placement.attempt,
        }
        self._tracks.begin_span(span, us, life.trajectory_id, **facts)
        if placement.number > 1 and lost in self._tracks:
            self._tracks.add_arrow("move", us, lost, span)
            self._tracks.end_span(lost, us, event=now.seq)
        elif placement.number > 1:  # lost and placed by the same event
            before = _slot_span(life, life.placements[-2])
            self._tracks.add_arrow("repack" if given else "move", us, before, span)
            how = {"given_away": True} if given else {"lost": True}
            self._tracks.end_span(before, us, event=now.seq, **how)

    def _trace_loss(self, life: TrajectoryHistory, now: Moment, us: float) -> None:
        """Link the old placement to a lost-work span, which lasts until the next placement."""
        if life.placement.dispatched == now:
            return  # placed again by the same event: the next change draws both
        before, lost = _slot_span(life, life.placement), _lost_span(life)
        self._tracks.begin_span(lost, us, life.trajectory_id, event=now.seq)
        self._tracks.add_arrow("move", us, before, lost)
        self._tracks.end_span(before, us, event=now.seq, lost=True)

    def _end_scoring(self, life: TrajectoryHistory, us: float, **facts: Any) -> None:
        if span := self._scoring.pop(life.trajectory_id, None):
            self._tracks.end_span(span, us, **facts)

    # --- the trainer's work, weights --------------------------------------------------------------

    def _trace_work(
        self, stamped: Stamped, us: float, commands: list[Command], state: State
    ) -> None:
        self._trace_versions(stamped, us, state)
        for span, key in list(self._orders.items()):
            outstanding = state.orders.commands.get(key)
            if outstanding is None or outstanding.cause == stamped.seq:
                del self._orders[span]
                self._tracks.end_span(span, us, event=stamped.seq, ended_by=get_tag(stamped.event))
        for command in commands:
            self._trace_order(command, stamped.seq, us, state)
        event = stamped.event
        if isinstance(event, ev.StepCompleted | ev.ModelExported):
            self._trace_publish(stamped.peer, event.version, us, state)

    def _trace_order(self, command: Command, seq: int, us: float, state: State) -> None:
        if isinstance(command, cmd.TrainStep):
            size = len(command.trajectories)
            facts = {"version": command.version, "trajectories": size}
            self._begin_order(
                (command.to, WORK, "train"),
                seq,
                us,
                f"step {step_number(command.step_index)}",
                facts,
            )
        elif isinstance(command, cmd.PublishWeights | cmd.ExportModel):
            key = "publish" if isinstance(command, cmd.PublishWeights) else "export"
            facts = {"version": command.version, "step": command.step}
            name = f"{key} v{command.version}"
            self._begin_order((command.to, WORK, key), seq, us, name, facts)
        elif isinstance(command, cmd.PullWeights):
            span: Span = (command.to, PULL, f"pull:{command.to}")
            name = f"pull v{command.version}" + ("" if command.exact else " or newer")
            source = {"purpose": command.purpose, "checkpoint": command.checkpoint}
            if command.holder:
                source["holder"] = command.holder
            self._begin_order(span, seq, us, name, source)
            version = state.members.replicas[command.to].relay, VERSION, str(command.version)
            if not (command.checkpoint or command.holder) and version in self._tracks:
                self._tracks.add_arrow("pull", us, version, span)

    def _begin_order(
        self, span: Span, seq: int, us: float, name: str, facts: dict[str, Any]
    ) -> None:
        """Open a span whose key is the key of the command in the state."""
        self._orders[span] = CommandKey(span[2])
        self._tracks.begin_span(span, us, name, event=seq, **facts)

    def _trace_publish(self, trainer: str, version: int, us: float, state: State) -> None:
        """Open a span for weights that are handed over but not yet a version of the relay."""
        known = version <= state.versions.newest or version == state.versions.owed
        if not known and version not in self._publishing:  # else it was reported already
            span = self._publishing[version] = (trainer, PUBLISHING, str(version))
            self._tracks.begin_span(span, us, f"publish v{version}", event=state.seq)

    def _trace_versions(self, stamped: Stamped, us: float, state: State) -> None:
        gone = [name for name in self._held if name not in state.members.relays]
        for name in [*gone, *state.members.relays]:
            before = self._held.get(name, [])
            held = state.members.relays[name].held if name in state.members.relays else []
            if held != before:
                self._held[name] = held
                self._trace_held(name, before, held, us, state)
        for name in gone:
            del self._held[name]
        for version in [v for v in self._publishing if v <= state.versions.newest]:
            self._tracks.end_span(self._publishing.pop(version), us, event=stamped.seq)

    def _trace_held(
        self, relay: str, before: list[int], held: list[int], us: float, state: State
    ) -> None:
        """Trace the versions that a relay evicted and received since the last call."""
        for version in [v for v in before if v not in held]:
            self._tracks.end_span((relay, VERSION, str(version)), us, event=state.seq)
        for version in [v for v in held if v not in before]:
            span = relay, VERSION, str(version)
            self._tracks.begin_span(span, us, f"v{version}", event=state.seq)
            place = state.members.relay_chain.index(relay)
            if not place:
                self._link_publish(version, span, us)
            elif version in self._held.get(state.members.relay_chain[place - 1], ()):
                source = state.members.relay_chain[place - 1], VERSION, str(version)
                self._tracks.add_arrow("broadcast", us, source, span)

    def _link_publish(self, version: int, span: Span, us: float) -> None:
        """Draw the arrow to a version from its publish, or else from work not reported yet."""
        work = [s for s in self._orders if s[1] == WORK]
        source = self._publishing.get(version) or next(iter(work), None)
        if source is not None:
            self._tracks.add_arrow("publish", us, source, span)

    # --- the coordinator, and what it refuses -----------------------------------------------------

    def _trace_coordinator(self, now: Moment, us: float, state: State) -> None:
        run = state.run
        if run.phase != self._phase:
            self._tracks.end_span((COORDINATOR, PHASE, self._phase), us, event=now.seq)
            self._phase = run.phase
            self._tracks.begin_span((COORDINATOR, PHASE, self._phase), us, run.phase, event=now.seq)
        running = state.evaluations.running
        span = (COORDINATOR, EVALUATION, str(running.index)) if running is not None else None
        if span == self._evaluation:
            return
        if self._evaluation is not None:
            found = {str(e.index): f"{e.correct}/{e.total}" for e in state.evaluations.results}
            result = found.get(self._evaluation[2], "")
            self._tracks.end_span(self._evaluation, us, event=now.seq, correct=result)
        if span is not None and running is not None:
            name = f"evaluation {running.index} of v{running.version}"
            self._tracks.begin_span(span, us, name, event=now.seq, step=running.step)
        self._evaluation = span

    def _trace_refusals(self, stamped: Stamped, now: Moment, us: float, state: State) -> None:
        """Trace idle time by reason; pulls have separate spans."""
        for idle in self._idleness.record_event(now, stamped, state):
            self._end_refusal(idle.replica, now, us)
        for name, idle in self._idleness.open.items():
            spell = idle.spells[-1]
            if self._refused.get(name) == spell.reason:
                continue
            self._end_refusal(name, now, us)
            self._refused[name] = spell.reason
            if spell.reason not in (PULLING, DOWN):
                span = (name, REFUSED, spell.reason)
                self._tracks.begin_span(span, us, spell.reason, event=now.seq, detail=spell.detail)

    def _end_refusal(self, name: str, now: Moment, us: float) -> None:
        if reason := self._refused.pop(name, ""):
            self._tracks.end_span((name, REFUSED, reason), us, event=now.seq)


def _slot_span(life: TrajectoryHistory, placement: Placement) -> Span:
    return placement.replica, SLOT, f"{life.trajectory_id}@{placement.number}"


def _lost_span(life: TrajectoryHistory) -> Span:
    return COORDINATOR, LOST_WORK, life.trajectory_id


def _select_fields(event: Event) -> dict[str, Any]:
    """Return the short fields; the configuration is in the log."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    left_out = ("type", "config")
    return {k: v for k, v in fields.items() if isinstance(v, str | int) and k not in left_out}


class EngineTracks:
    """Engine tracks of a trace: gauges as charts, migrations as spans.

    A migration span lasts from the order to give everything away until all of it runs elsewhere.
    """

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._giving: dict[str, Span] = {}  #: by replica that gives its work away
        self._figures: dict[str, tuple[int, ...]] = {}  #: latest figures by replica

    def record_event(
        self, stamped: Stamped, us: float, commands: list[Command], state: State
    ) -> None:
        """Record one event."""
        if isinstance(stamped.event, ev.TokenProgress):
            self._trace_gauges(stamped.peer, stamped.event, us)
        for name in list(self._giving):
            if name not in state.members.replicas or not state.members.replicas[name].outgoing:
                self._tracks.end_span(self._giving.pop(name), us, event=stamped.seq)
        for command in commands:
            if isinstance(command, cmd.ReleaseTrajectories):
                self._trace_release(command, stamped.seq, us, state)

    def _trace_release(
        self, command: cmd.ReleaseTrajectories, seq: int, us: float, state: State
    ) -> None:
        destination = state.repack.progress[command.items[0].trajectory_id].destination
        span = self._giving[command.to] = (command.to, MIGRATION, MIGRATION)
        self._tracks.begin_span(span, us, f"gives {len(command.items)} to {destination}", event=seq)

    def _trace_gauges(self, replica: str, event: ev.TokenProgress, us: float) -> None:
        figures = event.kv_used_tokens, event.running, event.waiting
        if self._figures.get(replica) != figures:
            self._figures[replica] = figures
            self._tracks.add_counters(replica, us, "cache", tokens=event.kv_used_tokens)
            running, waiting = event.running, event.waiting
            self._tracks.add_counters(replica, us, "sequences", running=running, waiting=waiting)
