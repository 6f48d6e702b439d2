"""Tables of facts about a run: their columns, and the meaning of each.

Reads   nothing
Gives   a class for the rows of each table; TABLES, by name; RUN_TABLE, of SQL only; Table, which
        turns rows into plain values; FACTS_VERSION; describe_tables: lines for a terminal

The facts follow from the event log alone, by one replay (collector.py). `laminar log sql` queries
them, and every command that analyzes a run reads them. Times are seconds since the first event of
the run, as all commands show them; a column NAME_event has the number of the event at that time. A
time that has not come, or a value that does not exist, is NULL. Steps are counted from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform

from laminar.analysis.log.event_clock import Moment
from laminar.names.ids import GroupId, TrajectoryId

Row = tuple[Any, ...]
RowType = TypeVar("RowType")
Add = Callable[[str, Any], None]
"""Receiver of a complete row of the table with this name."""
FACTS_VERSION = 1
"""Version of these tables and of their derivation: facts of another version are built again."""

Kind = Literal["int", "float", "text", "bool", "texts", "timestamp"]
KINDS: dict[str, Kind] = {
    "int": "int", "float": "float", "bool": "bool", "datetime": "timestamp", "Moment": "float",
    "str": "text", "TrajectoryId": "text", "GroupId": "text", "list[TrajectoryId]": "texts",
}  # fmt: skip
"""Kinds by the annotation of a column; a Moment has two columns: time and event."""


def column(meaning: str, value: Any = None) -> Any:
    """Declare a column of a row, with its value until another one is set; None is NULL."""
    return field(default=value, metadata={"text": meaning})


class Column(NamedTuple):
    """Column of a table."""

    name: str
    kind: Kind
    text: str


class Table:
    """Table of facts; its rows are in the order in which they became complete."""

    def __init__(self, name: str, row: Any) -> None:
        self.name, self.text = name, f"{row.__doc__[0].lower()}{row.__doc__[1:-1]}"
        self.columns: list[Column] = []
        self._fields: list[tuple[str, bool]] = []  #: name, and whether it is a moment
        for part in fields(row):
            kind = part.type.removesuffix(" | None")
            self._fields.append((part.name, kind == "Moment"))
            self.columns.append(Column(part.name, KINDS[kind], part.metadata["text"]))
            if kind == "Moment":
                self.columns.append(Column(f"{part.name}_event", "int", f"event at `{part.name}`"))

    def list_values(self, row: Any) -> Row:
        """Return the values of all columns of a row."""
        found: list[Any] = []
        for name, is_moment in self._fields:
            value = getattr(row, name)
            if not is_moment:
                found.append(value)
            else:
                found += (None, None) if value is None else (value.seconds, value.seq)
        return tuple(found)


TABLES: dict[str, Table] = {}


@dataclass_transform()
def _declare_row(name: str) -> Callable[[type[RowType]], type[RowType]]:
    """Make a dataclass, for the rows of the table with this name."""

    def declare(row: type[RowType]) -> type[RowType]:
        made = dataclass(slots=True)(row)
        TABLES[name] = Table(name, made)
        return made

    return declare


@_declare_row("events")
class EventRow:
    """Every event of the log."""

    event: int = column("number")
    time: float = column("time")
    sender: str = column("process that reported it")
    incarnation: int = column("fencing number of that process")
    type: str = column("e.g. trajectory-started")
    fields: str = column("all fields, as JSON")


@_declare_row("decisions")
class DecisionRow:
    """Every command, with the event that caused it."""

    event: int = column("event that caused it")
    number: int = column("order among the commands of that event, from 0")
    time: float = column("time")
    type: str = column("e.g. generate-trajectory")
    receiver: str = column("process that carries it out")
    fields: str = column("all fields, as JSON")


@_declare_row("trajectories")
class TrajectoryRow:
    """A row per trajectory; replica, version, start: of its last placement."""

    trajectory: TrajectoryId = column("id")
    group_id: GroupId = column("group of siblings, which share a prompt")
    sibling: int = column("number in the group, from 0")
    purpose: str = column("train or eval")
    row_index: int = column("row of the data")
    replica: str = column("last replica, or host of its session")
    version: int = column("weights of its last placement")
    version_step: int = column("steps that made those weights")
    attempts: int = column("attempts; a later one began again from the prompt")
    placements: int = column("placements")
    turns: int = column("turns begun, or due", 1)
    prompt_tokens: int | None = column("tokens of the prompt, NULL if unknown")
    dispatched: Moment = column("first placement")
    started: Moment | None = column("start at the last replica")
    finished: Moment | None = column("last token")
    scorer: str | None = column("process asked to score it")
    scoring: Moment | None = column("order to score it")
    rewarded: Moment | None = column("reward")
    chosen: Moment | None = column("choice for a batch")
    ending: Moment | None = column("decision about its end")
    ended: Moment | None = column("the store has its end")
    tokens: int = column("sampled tokens", 0)
    tokens_lost: int = column("discarded tokens of earlier attempts", 0)
    finish_reason: str | None = column("as reported by the engine")
    ended_by: str | None = column("limit of the environment that ended it")
    truncated_by: str | None = column("limit of the engine or the environment that truncated it")
    reward: float | None = column("score")
    correct: bool | None = column("score of 1 or more and not truncated")
    reward_reason: str | None = column("ok, or why scoring failed")
    outcome: str | None = column("trained, evaluated or dropped; NULL: open")
    outcome_reason: str | None = column("reason of a drop")
    step: int | None = column("step that trained it; of an evaluation sample: completed steps")
    staleness: int | None = column(
        "steps from the weights of its last attempt to its batch, if trained"
    )


@_declare_row("placements")
class PlacementRow:
    """Stays of trajectories on replicas; each dispatch makes one."""

    trajectory: str = column("id")
    placement: int = column("number, from 1")
    purpose: str = column("train or eval")
    replica: str = column("replica, or host of its session")
    version: int = column("weights at its start")
    version_step: int = column("steps that made those weights")
    attempt: int = column("attempt")
    turn: int = column("turn that it began with, from 1")
    dispatched: Moment = column("order to generate")
    started: Moment | None = column("start")
    tokens_resumed: int = column("stored tokens that it continued from", 0)
    prompt_tokens: int | None = column("tokens of the prompt")
    left_at: Moment | None = column("end of the stay")
    left_how: str | None = column("finished, turn, lost, released or ended; NULL: it lasts")
    moved_because: str | None = column("why this placement followed a lost or released one")
    moved_from: str | None = column("source of its weights, if the replica had to load them")


@_declare_row("updates")
class UpdateRow:
    """Weights that running trajectories continued with, loaded in flight."""

    trajectory: str = column("id")
    placement: int = column("number")
    replica: str = column("replica")
    version: int = column("weights")
    loaded: Moment = column("load")


@_declare_row("turns")
class TurnRow:
    """Finished turns; a trajectory without an environment has one."""

    trajectory: str = column("id")
    turn: int = column("number, from 1")
    replica: str = column("replica")
    version: int = column("weights at its start")
    requested: Moment | None = column("request of the session; NULL for a first turn without one")
    dispatched: Moment = column("order to generate")
    started: Moment | None = column("start")
    finished: Moment | None = column("last token")
    tokens: int = column("tokens sampled so far")
    finish_reason: str = column("as reported by the engine")


@_declare_row("groups")
class GroupRow:
    """Groups of siblings that have ended, or are complete."""

    group_id: str = column("id")
    complete: Moment | None = column("all siblings scored, or ended")
    mixed: bool = column("whether its siblings are of several versions")


@_declare_row("replica_states")
class ReplicaStateRow:
    """Activity of each replica: busy, or why it ran nothing."""

    replica: str = column("name")
    state: str = column("busy, pulling, no-weights, down, free, or why it got no work")
    began: Moment = column("begin")
    ended: Moment | None = column("end; NULL: it lasts")
    version: int = column("weights")
    detail: str | None = column("figures behind the reason")
    cause: str = column("event that began it")
    idle_since_event: int | None = column(
        "first event of the idle time that it is part of; NULL if busy"
    )


@_declare_row("conditions")
class ConditionRow:
    """Intervals in which a condition held."""

    actor: str = column("process; empty: the run")
    condition: str = column(
        "live, running, loading, bound, spare; run: phase-*, bound, trainer-free"
    )
    began: Moment = column("begin")
    ended: Moment | None = column("end; NULL: it lasts")


@_declare_row("steps")
class StepRow:
    """Optimizer steps that were ordered, as last ordered."""

    step: int = column("number")
    version: int = column("weights that it makes")
    ordered: Moment = column("order")
    completed: Moment | None = column("report of the trainer")
    groups: int = column("groups")
    trajectories: list[TrajectoryId] = column("ids, in the order of the batch")
    tokens: int | None = column("response tokens")
    changed: bool | None = column("whether the weights changed")
    reason: str | None = column("why they did not")
    waited: float = column("seconds that the trainer was free before")
    left_out: str | None = column("rows excluded from training, as JSON")
    metrics: str | None = column("figures of the step, as JSON")


@_declare_row("trainer_waits")
class TrainerWaitRow:
    """Parts of the time in which the trainer was free before a step."""

    step: int = column("step that followed")
    reason: str = column("start, publish, groups, strategy or staleness-bound")
    began: Moment = column("begin")
    ended: Moment | None = column("end")
    detail: str = column("figures behind the reason")
    cause: str = column("event that began the wait")


@_declare_row("versions")
class VersionRow:
    """Published versions of the weights."""

    version: int = column("number")
    step: int = column("steps that made it")
    published: Moment = column("report of the first relay")
    digest: str = column("digest of the weights")


@_declare_row("holdings")
class HoldingRow:
    """Versions that relays held."""

    relay: str = column("name")
    version: int = column("number")
    began: Moment = column("begin")
    ended: Moment | None = column("end; NULL: it lasts")


@_declare_row("loads")
class LoadRow:
    """Orders to replicas to load weights."""

    replica: str = column("name")
    version: int = column("number")
    exact: bool = column("false: that version or newer")
    purpose: str = column("why it was loaded")
    source: str = column("other relay or checkpoint; empty: its own relay")
    source_detail: str | None = column("why from there")
    ordered: Moment = column("order")
    ended: Moment | None = column("outcome")
    outcome: str | None = column("type of the event that ended it; NULL: open")
    loaded: int | None = column("version that it has since")
    seconds: float | None = column("duration, by the replica's clock")
    probe_kl: float | None = column("KL of engine and trainer over the probe, nats per token")


@_declare_row("migrations")
class MigrationRow:
    """Replicas that repack emptied."""

    source: str = column("replica that gave its work away")
    destination: str = column("replica that received it")
    version: int = column("weights of both")
    ordered: Moment = column("order")
    placed: Moment | None = column("nothing left to place")
    freed: Moment | None = column("all of it has started elsewhere, or has ended")
    done: Moment | None = column("its last trajectory finished, was lost or ended")
    given: int = column("trajectories")
    moved: int = column("trajectories that continued at the destination", 0)
    expired: bool = column("whether the source did not answer in time", False)
    tokens_prefilled: int = column("tokens prefilled again, prompts included", 0)
    trajectories: list[TrajectoryId] = column("ids")


@_declare_row("repack_decisions")
class RepackDecisionRow:
    """Findings of repack at each search, per replica with work."""

    replica: str = column("name")
    searched: Moment = column("search")
    version: int = column("weights")
    running: int = column("trajectories")
    reason: str = column("emptied, or why it was left as it was")
    detail: str | None = column("figures behind the reason")
    trajectories: list[TrajectoryId] | None = column("ids, where the replica was a straggler")


@_declare_row("evaluations")
class EvaluationRow:
    """Finished evaluations."""

    evaluation: int = column("number, from 0")
    done: Moment = column("last sample")
    step: int = column("completed steps")
    version: int = column("weights")
    final: bool = column("whether the run ended with it")
    correct: int = column("correct samples")
    total: int = column("samples")
    missing: int = column("samples without a score")
    share: float | None = column("share of correct samples")
    share_se: float | None = column("its standard error")
    score: float | None = column("mean score")
    score_se: float | None = column("its standard error")
    mean_length: float | None = column("tokens")
    truncated_share: float | None = column("share of truncated samples")


@_declare_row("processes")
class ProcessRow:
    """Lives of processes; a second row of a name is a restart."""

    process: str = column("name")
    role: str = column("role")
    node: str = column("machine")
    pid: int | None = column("process id")
    joined: Moment = column("first hello")
    ready: Moment | None = column("ready for work")
    ended: Moment | None = column("end; NULL: it lives")
    reason: str | None = column("why it was lost, or restarted; NULL: it left")
    slots: int | None = column("sequences that the engine of a replica runs at a time")


@_declare_row("gauges")
class GaugeRow:
    """Reports of replicas at fixed intervals."""

    replica: str = column("name")
    reported: Moment = column("report")
    phase: str = column("phase of the run")
    running: int = column("sequences")
    waiting: int = column("sequences")
    kv_used: int = column("tokens")
    kv_capacity: int = column("tokens; 0: unknown")
    tokens_total: int = column("sampled since its process began")


@_declare_row("warnings")
class WarningRow:
    """Warnings about training."""

    kind: str = column("kind; each is given once")
    given: Moment = column("report")
    step: int = column("completed steps")
    text: str = column("figure, limit and remedy")


@_declare_row("tool_calls")
class ToolCallRow:
    """Calls of environments, from the store."""

    trajectory: str = column("id")
    attempt: int = column("attempt")
    turn: int = column("number, from 0")
    call: int = column("number in the turn, from 0")
    tool: str = column("name")
    status: str = column("done, failed, timed-out, lost or intended")
    seconds: float = column("duration")


@_declare_row("run")
class RunRow:
    """The runs of a query; with several, every table has the column `run`."""

    run: str = column("name")
    directory: str = column("path")
    started: datetime = column("first event, UTC")
    seconds: float = column("from the first event to the last")
    events: int = column("number of the last event")
    begins_at: int = column("event after which the facts begin; 0: they are of the whole run")


RUN_TABLE = TABLES.pop("run")  # of queries only


def describe_tables() -> Iterator[str]:
    """Yield a line per table and column, for `laminar log sql` without a query."""
    for table in (*TABLES.values(), RUN_TABLE):
        yield f"{table.name}: {table.text}"
        for found in table.columns:
            yield f"  {found.name:<20} {found.kind:<9} {found.text}"
