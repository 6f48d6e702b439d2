"""Tables of facts about a run: their columns, and the meaning of each.

Reads   nothing
Gives   TABLES, by name; RUN_TABLE, of SQL only; Table and Column; FACTS_VERSION; describe_tables:
        lines for a terminal

The facts follow from the event log alone, by one replay (collector.py). `laminar log sql` queries
them, and every command that analyzes a run reads them. Times are seconds since the first event of
the run, as all commands show them; a column NAME_event has the number of the event at that time. A
time that has not come, or a value that does not exist, is NULL. Steps are counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

FACTS_VERSION = 1
"""Version of these tables and of their derivation: facts of another version are built again."""

Kind = Literal["int", "float", "text", "bool", "texts", "timestamp"]


class Column(NamedTuple):
    """Column of a table."""

    name: str
    kind: Kind
    text: str


class Table(NamedTuple):
    """Table of facts; its rows are in the order in which they became complete."""

    name: str
    text: str
    columns: tuple[Column, ...]


def _parse_columns(text: str) -> tuple[Column, ...]:
    """Parse one column per line: name, kind, meaning. `time` gives two columns: time and event."""
    found: list[Column] = []
    for line in text.strip().splitlines():
        name, kind, meaning = line.split(maxsplit=2)
        if kind == "time":
            found.append(Column(name, "float", meaning))
            found.append(Column(f"{name}_event", "int", f"event at `{name}`"))
        else:
            found.append(Column(name, kind, meaning))  # type: ignore[arg-type]
    return tuple(found)


def _declare_table(name: str, text: str, columns: str) -> Table:
    return Table(name, text, _parse_columns(columns))


_ALL = (
    _declare_table(
        "events",
        "every event of the log",
        """
        event int number
        time float time
        sender text process that reported it
        incarnation int fencing number of that process
        type text e.g. trajectory-started
        fields text all fields, as JSON
        """,
    ),
    _declare_table(
        "decisions",
        "every command, with the event that caused it",
        """
        event int event that caused it
        number int order among the commands of that event, from 0
        time float time
        type text e.g. generate-trajectory
        receiver text process that carries it out
        fields text all fields, as JSON
        """,
    ),
    _declare_table(
        "trajectories",
        "a row per trajectory; replica, version, start: of its last placement",
        """
        trajectory text id
        group_id text group of siblings, which share a prompt
        sibling int number in the group, from 0
        purpose text train or eval
        row_index int row of the data
        replica text last replica, or host of its session
        version int weights of its last placement
        version_step int steps that made those weights
        attempts int attempts; a later one began again from the prompt
        placements int placements
        turns int turns begun, or due
        prompt_tokens int tokens of the prompt, NULL if unknown
        dispatched time first placement
        started time start at the last replica
        finished time last token
        scorer text process asked to score it
        scoring time order to score it
        rewarded time reward
        chosen time choice for a batch
        ending time decision about its end
        ended time the store has its end
        tokens int sampled tokens
        tokens_lost int discarded tokens of earlier attempts
        finish_reason text as reported by the engine
        ended_by text limit of the environment that ended it
        truncated_by text limit of the engine or the environment that truncated it
        reward float score
        correct bool score of 1 or more and not truncated
        reward_reason text ok, or why scoring failed
        outcome text trained, evaluated or dropped; NULL: open
        outcome_reason text reason of a drop
        step int step that trained it; of an evaluation sample: completed steps
        staleness int steps from the weights of its last attempt to its batch, if trained
        """,
    ),
    _declare_table(
        "placements",
        "stays of trajectories on replicas; each dispatch makes one",
        """
        trajectory text id
        placement int number, from 1
        purpose text train or eval
        replica text replica, or host of its session
        version int weights at its start
        version_step int steps that made those weights
        attempt int attempt
        turn int turn that it began with, from 1
        dispatched time order to generate
        started time start
        tokens_resumed int stored tokens that it continued from
        prompt_tokens int tokens of the prompt
        left_at time end of the stay
        left_how text finished, turn, lost, released or ended; NULL: it lasts
        moved_because text why this placement followed a lost or released one
        moved_from text source of its weights, if the replica had to load them
        """,
    ),
    _declare_table(
        "updates",
        "weights that running trajectories continued with, loaded in flight",
        """
        trajectory text id
        placement int number
        replica text replica
        version int weights
        loaded time load
        """,
    ),
    _declare_table(
        "turns",
        "finished turns; a trajectory without an environment has one",
        """
        trajectory text id
        turn int number, from 1
        replica text replica
        version int weights at its start
        requested time request of the session; NULL for a first turn without one
        dispatched time order to generate
        started time start
        finished time last token
        tokens int tokens sampled so far
        finish_reason text as reported by the engine
        """,
    ),
    _declare_table(
        "groups",
        "groups of siblings that have ended, or are complete",
        """
        group_id text id
        complete time all siblings scored, or ended
        mixed bool whether its siblings are of several versions
        """,
    ),
    _declare_table(
        "replica_states",
        "what each replica did: busy, or why it ran nothing",
        """
        replica text name
        state text busy, pulling, no-weights, down, free, or why it got no work
        began time begin
        ended time end; NULL: it lasts
        version int weights
        detail text figures behind the reason
        cause text event that began it
        idle_since_event int first event of the idle time that it is part of; NULL if busy
        """,
    ),
    _declare_table(
        "conditions",
        "intervals in which a condition held",
        """
        actor text process; empty: the run
        condition text live, running, loading, bound, spare; run: phase-*, bound, trainer-free
        began time begin
        ended time end; NULL: it lasts
        """,
    ),
    _declare_table(
        "steps",
        "optimizer steps that were ordered, as last ordered",
        """
        step int number
        version int weights that it makes
        ordered time order
        completed time report of the trainer
        groups int groups
        trajectories texts ids, in the order of the batch
        tokens int response tokens
        changed bool whether the weights changed
        reason text why they did not
        waited float seconds that the trainer was free before
        left_out text rows excluded from training, as JSON
        metrics text figures of the step, as JSON
        """,
    ),
    _declare_table(
        "trainer_waits",
        "parts of the time in which the trainer was free before a step",
        """
        step int step that followed
        reason text start, publish, groups, strategy or staleness-bound
        began time begin
        ended time end
        detail text figures behind the reason
        cause text event that began the wait
        """,
    ),
    _declare_table(
        "versions",
        "published versions of the weights",
        """
        version int number
        step int steps that made it
        published time report of the first relay
        digest text digest of the weights
        """,
    ),
    _declare_table(
        "holdings",
        "versions that relays held",
        """
        relay text name
        version int number
        began time begin
        ended time end; NULL: it lasts
        """,
    ),
    _declare_table(
        "loads",
        "orders to replicas to load weights",
        """
        replica text name
        version int number
        exact bool false: that version or newer
        purpose text why it was loaded
        source text other relay or checkpoint; empty: its own relay
        source_detail text why from there
        ordered time order
        ended time outcome
        outcome text type of the event that ended it; NULL: open
        loaded int version that it has since
        seconds float duration, by the replica's clock
        probe_kl float KL of engine and trainer over the probe, nats per token
        """,
    ),
    _declare_table(
        "migrations",
        "replicas that repack emptied",
        """
        source text replica that gave its work away
        destination text replica that received it
        version int weights of both
        ordered time order
        placed time nothing left to place
        freed time all of it has started elsewhere, or has ended
        done time its last trajectory finished, was lost or ended
        given int trajectories
        moved int trajectories that continued at the destination
        expired bool whether the source did not answer in time
        tokens_prefilled int tokens prefilled again, prompts included
        trajectories texts ids
        """,
    ),
    _declare_table(
        "repack_decisions",
        "what repack found at each search, per replica with work",
        """
        replica text name
        searched time search
        version int weights
        running int trajectories
        reason text emptied, or why it was left as it was
        detail text figures behind the reason
        trajectories texts ids, where the replica was a straggler
        """,
    ),
    _declare_table(
        "evaluations",
        "finished evaluations",
        """
        evaluation int number, from 0
        done time last sample
        step int completed steps
        version int weights
        final bool whether the run ended with it
        correct int correct samples
        total int samples
        missing int samples without a score
        share float share of correct samples
        share_se float its standard error
        score float mean score
        score_se float its standard error
        mean_length float tokens
        truncated_share float share of truncated samples
        """,
    ),
    _declare_table(
        "processes",
        "lives of processes; a second row of a name is a restart",
        """
        process text name
        role text role
        node text machine
        pid int process id
        joined time first hello
        ready time ready for work
        ended time end; NULL: it lives
        reason text why it was lost, or restarted; NULL: it left
        slots int sequences that the engine of a replica runs at a time
        """,
    ),
    _declare_table(
        "gauges",
        "reports of replicas at fixed intervals",
        """
        replica text name
        reported time report
        phase text phase of the run
        running int sequences
        waiting int sequences
        kv_used int tokens
        kv_capacity int tokens; 0: unknown
        tokens_total int sampled since its process began
        """,
    ),
    _declare_table(
        "warnings",
        "warnings about training",
        """
        kind text kind; each is given once
        given time report
        step int completed steps
        text text figure, limit and remedy
        """,
    ),
    _declare_table(
        "tool_calls",
        "calls of environments, from the store",
        """
        trajectory text id
        attempt int attempt
        turn int number, from 0
        call int number in the turn, from 0
        tool text name
        status text done, failed, timed-out, lost or intended
        seconds float duration
        """,
    ),
)
TABLES = {table.name: table for table in _ALL}
RUN_TABLE = _declare_table(
    "run",
    "the runs of a query; with several, every table has the column `run`",
    """
    run text name
    directory text path
    started timestamp first event, UTC
    seconds float from the first event to the last
    events int number of the last event
    begins_at int event after which the facts begin; 0: they are of the whole run
    """,
)


def describe_tables() -> Iterator[str]:
    """Yield a line per table and column, for `laminar log sql` without a query."""
    for table in (*TABLES.values(), RUN_TABLE):
        yield f"{table.name}: {table.text}"
        for column in table.columns:
            yield f"  {column.name:<20} {column.kind:<9} {column.text}"
