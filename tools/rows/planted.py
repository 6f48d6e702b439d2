"""Planted bugs: single rules of the product taken out or turned around, each under its name.

Reads   nothing
Gives   PLANTED: functions that put one bug into the running program, through a Planter

A rule whose absence no simulated run notices is either not needed or not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any
from unittest import mock

import laminar.coordinator.tick as tick
import laminar.eventlog.crashes as crashes
import laminar.eventlog.replay as log_replay
from laminar.actors.protocol import CommandFilter
from laminar.coordinator.detector import FailureDetector
from laminar.coordinator.restarts import Over, Restarts
from laminar.coordinator.unhandled import HandlingFailed
from laminar.core import (
    admission,
    buffering,
    dispatch,
    evaluation,
    groups,
    invariants,
    keys,
    machine,
    membership,
    publishing,
    recovery,
    relays,
    timers,
    trajectories,
    weights,
)
from laminar.core.context import Context
from laminar.core.indexes import indexes_of
from laminar.core.machine import HANDLING
from laminar.core.replica_index import Kind, ReplicaIndex
from laminar.core.state import Replica, State, Trajectory
from laminar.eventlog.writer import LogWriter
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.names import exit_codes
from laminar.net.session import ServerLink
from laminar.net.session_boxes import NEVER_NS, Inbox, Outbox
from laminar.storage import rules
from laminar.weights.arena.slots import SlotTable


class Planter(ExitStack):
    """Puts bugs in; closing it takes them out again."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.enter_context(mock.patch.object(owner, name, value))

    def handler(self, event: type[Event], handler: Callable[[Context, Any], None]) -> None:
        bad = HANDLING[event]._replace(handler=handler)
        self.enter_context(mock.patch.dict(HANDLING, {event: bad}))


# --- why it cannot stand still ----------------------------------------------------------------


def lost_work_only_to_admitting_replicas(plant: Planter) -> None:
    place_for = recovery._place_for

    def planted(state: State, trajectory: Trajectory) -> Replica | None:
        replica = place_for(state, trajectory)
        return replica if replica is not None and admission.admits(state, replica) else None

    plant.replace(recovery, "_place_for", planted)


def closed_for_good_after_groups_per_version(plant: Planter) -> None:
    refusal = admission.refusal

    def planted(state: State, replica: Replica) -> str:
        took_its_share = replica.took >= state.settings.groups_per_version
        return "draining" if took_its_share else refusal(state, replica)

    plant.replace(admission, "refusal", planted)


def bound_counted_from_the_next_batch_on(plant: Planter) -> None:
    """d >= s instead of d >= s - 1."""

    def planted(deadlines: dict[int, int], chosen: int, groups_per_step: int) -> bool:
        return all(
            sum(n for deadline, n in deadlines.items() if deadline <= d)
            <= groups_per_step * (d - chosen + 1)
            for d in deadlines
            if d >= chosen
        )

    plant.replace(admission, "bound_holds", planted)
    plant.replace(buffering, "bound_holds", planted)
    plant.replace(invariants, "bound_holds", planted)


def skipped_publish_is_not_owed(plant: Planter) -> None:
    def planted(ctx: Context, event: ev.PublishSkipped) -> None:
        """The trainer went on, and nothing is remembered."""

    plant.handler(ev.PublishSkipped, planted)


def owed_publish_is_not_paid(plant: Planter) -> None:
    plant.replace(publishing, "republish", lambda ctx: None)


def batch_chosen_without_preserving_the_bound(plant: Planter) -> None:
    plant.replace(buffering, "preserves_bound", lambda state, batch: True)


def dropped_group_keeps_its_place(plant: Planter) -> None:
    """Called by drops only; batch choice has its own name for it."""
    plant.replace(groups, "remove_unchosen", lambda state, group: None)


def nobody_acts_when_a_batch_waits(plant: Planter) -> None:
    plant.replace(recovery, "batch_wait_expired", lambda ctx: None)


def start_over_is_never_allowed(plant: Planter) -> None:
    """Lost work waits for its own version, for ever."""

    def planted(state: State, trajectory: Trajectory) -> Replica | None:
        index = indexes_of(state).replicas
        return index.least(index.able(trajectory.version), room=1)

    plant.replace(recovery, "_place_for", planted)


def prompt_is_skipped_while_an_evaluation_is_due(plant: Planter) -> None:
    next_row = dispatch.next_row

    def planted(state: State) -> Any:
        state.cursor += state.evaluation_due >= 0
        return next_row(state)

    plant.replace(dispatch, "next_row", planted)


def lost_evaluation_is_forgotten(plant: Planter) -> None:
    plant.replace(evaluation, "group_lost", lambda ctx, group: None)


# --- placements, incarnations, quarantine -----------------------------------------------------


def placement_is_not_raised(plant: Planter) -> None:
    place_again = dispatch.place_again

    def planted(ctx: Context, trajectory: Trajectory, replica: Replica) -> None:
        trajectory.placement -= 1
        place_again(ctx, trajectory, replica)

    plant.replace(recovery, "place_again", planted)


def old_placement_is_believed(plant: Planter) -> None:
    def planted(ctx: Context, trajectory_id: Any, placement: int) -> Trajectory | None:
        return ctx.state.trajectories.get(trajectory_id)

    plant.replace(trajectories, "_present", planted)


def fenced_words_are_believed(plant: Planter) -> None:
    def planted(ctx: Context) -> bool:
        stamped = ctx.stamped
        actor = ctx.state.actors.get(stamped.peer)
        if actor is not None and stamped.peer_seq:
            actor.last_peer_seq = stamped.peer_seq
        return True

    plant.replace(machine, "_from_known_sender", planted)
    plant.replace(tick.Tick, "_fenced", lambda self, link: False)


def killer_prompts_are_not_quarantined(plant: Planter) -> None:
    plant.replace(recovery, "DEATHS_MAX", 1_000)


def store_lets_lower_placements_write(plant: Planter) -> None:
    plant.replace(rules, "_barred", lambda row, placement: None)


def retry_goes_on_with_old_tokens(plant: Planter) -> None:
    opened = rules.opened

    def planted(row: Any, change: Any, asked: Any) -> Any:
        return opened(row, "move" if change == "restart" else change, asked)

    plant.replace(rules, "opened", planted)


def rewards_of_a_lost_replica_are_forgotten(plant: Planter) -> None:
    plant.replace(recovery, "plan_unscored", lambda ctx: None)


def dead_replica_keeps_its_work(plant: Planter) -> None:
    def planted(ctx: Context, name: str) -> None:
        ctx.state.replicas.pop(name, None)

    plant.replace(recovery, "replica_lost", planted)


def draining_replica_is_not_emptied_before_a_pull(plant: Planter) -> None:
    def planted(state: State, replica: Replica) -> bool:
        return state.actor_alive(replica.name) and not replica.loading and state.newest >= 0

    plant.replace(weights, "_can_pull", planted)


def new_process_keeps_the_old_incarnation(plant: Planter) -> None:
    on_joined = membership.on_actor_joined

    def planted(ctx: Context, event: ev.ActorJoined) -> None:
        known = ctx.state.actors.get(event.name)
        following = ctx.state.next_incarnation
        if known is not None:
            ctx.state.next_incarnation = known.incarnation
        on_joined(ctx, event)
        ctx.state.next_incarnation = max(following, ctx.state.next_incarnation)

    plant.handler(ev.ActorJoined, planted)


# --- relays -----------------------------------------------------------------------------------


def splice_is_not_sent(plant: Planter) -> None:
    """A lost relay leaves the chain, and its predecessor never hears who comes next."""
    forward = relays._forward

    def planted(ctx: Context, relay: Any, successor: Any) -> None:
        if isinstance(ctx.stamped.event, ev.RelayReady):
            forward(ctx, relay, successor)

    plant.replace(relays, "_forward", planted)


def rejoined_relay_is_not_fed(plant: Planter) -> None:
    """Its predecessor is told nothing when it is ready again."""
    join = relays.join

    def planted(ctx: Context, actor: Any, bulk: str) -> Any:
        with mock.patch.object(relays, "_forward", lambda ctx, relay, successor: None):
            return join(ctx, actor, bulk)

    plant.replace(relays, "join", planted)


def owed_republish_is_forgotten(plant: Planter) -> None:
    """The relay of the trainer's machine comes back empty, and nobody publishes again."""
    plant.replace(publishing, "owe_republish", lambda ctx: None)


def missing_version_is_not_waited_for(plant: Planter) -> None:
    plant.replace(relays, "await_newest", lambda ctx, relay: None)


def slow_relay_leaves_the_chain_broken(plant: Planter) -> None:
    """It goes to the end, and everybody still feeds whom they fed."""
    move_slow = relays._move_slow

    def planted(ctx: Context) -> None:
        with mock.patch.object(relays, "relink", lambda ctx: None):
            move_slow(ctx)

    plant.replace(relays, "_move_slow", planted)


# --- deadlines --------------------------------------------------------------------------------


def commands_have_no_deadline(plant: Planter) -> None:
    command = Context.command

    def planted(self: Context, command_: Any, key: str = "", timeout_ms: int = 0) -> None:
        command(self, command_, key)

    plant.replace(Context, "command", planted)


def overdue_pull_is_left_alone(plant: Planter) -> None:
    expired = timers._command_expired

    def planted(ctx: Context, key: str) -> None:
        if not key.startswith("pull:"):
            expired(ctx, key)

    plant.replace(timers, "_command_expired", planted)


def overdue_restart_is_left_alone(plant: Planter) -> None:
    plant.replace(
        membership, "restart_expired", lambda ctx, order: ctx.done(keys.restart(order.actor))
    )


def overdue_link_is_left_alone(plant: Planter) -> None:
    plant.replace(relays, "link_expired", lambda ctx, name, successor: None)


def overdue_transfer_is_left_alone(plant: Planter) -> None:
    """It is looked at again and again, and nobody is restarted."""
    plant.replace(
        relays,
        "receive_expired",
        lambda ctx, name: relays.await_newest(ctx, ctx.state.relays[name]),
    )


# --- the tick, the log and the session --------------------------------------------------------


def commands_leave_before_the_sync(plant: Planter) -> None:
    plant.replace(tick.Tick, "_make_durable", lambda self: self.log.flush())


def sync_is_left_out(plant: Planter) -> None:
    plant.replace(LogWriter, "_sync", lambda self: None)


def decisions_are_not_logged(plant: Planter) -> None:
    """The second of an event is sent, and the log never hears of it."""
    append = LogWriter.append

    def planted(self: LogWriter, record: Any) -> None:
        if getattr(record, "index", 0) == 0:
            append(self, record)

    plant.replace(LogWriter, "append", planted)


def server_takes_a_number_twice(plant: Planter) -> None:
    def planted(self: Inbox, seq: int) -> bool:
        self.ack_due = True
        self.delivered = max(self.delivered, seq)
        return seq <= self.delivered

    plant.replace(Inbox, "accept", planted)


def event_is_lost_between_link_and_machine(plant: Planter) -> None:
    receive = ServerLink.receive

    def planted(link: ServerLink, frame: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        bodies = receive(link, frame, now_ns)
        return bodies[:0] if bodies and bodies[0][0] % 7 == 0 else bodies

    plant.replace(ServerLink, "receive", planted)


def nothing_is_sent_again(plant: Planter) -> None:
    plant.replace(Outbox, "expired", lambda self, now_ns: False)
    plant.replace(Outbox, "next_due_ns", lambda self: 0 if self._may_send() else NEVER_NS)


def actor_forgets_its_commands(plant: Planter) -> None:
    plant.replace(CommandFilter, "take", lambda self, command_id: True)


def outstanding_commands_are_not_repeated(plant: Planter) -> None:
    link = tick.Tick._link

    def planted(self: tick.Tick, hello: Any, incarnation: int, last_seq: int, now: int) -> None:
        outgoing = len(self._outgoing)
        link(self, hello, incarnation, last_seq, now)
        del self._outgoing[outgoing:]

    plant.replace(tick.Tick, "_link", planted)


def last_number_of_a_peer_is_not_restored(plant: Planter) -> None:
    link = tick.Tick._link

    def planted(self: tick.Tick, hello: Any, incarnation: int, last_seq: int, now: int) -> None:
        link(self, hello, incarnation, 0, now)

    plant.replace(tick.Tick, "_link", planted)


def stale_server_is_believed(plant: Planter) -> None:
    """An acknowledgement for a dead coordinator counts for its successor."""
    plant.replace(ServerLink, "_resume", lambda self, first_seq: self.inbox.skip_to(first_seq - 1))


def silence_is_judged_after_half_a_lease(plant: Planter) -> None:
    lease_of_ns = FailureDetector.lease_of_ns
    plant.replace(FailureDetector, "lease_of_ns", lambda self, role: lease_of_ns(self, role) // 2)


def silence_is_judged_without_grace(plant: Planter) -> None:
    def planted(self: FailureDetector, now_ns: int, socket_empty: bool) -> bool:
        self._grace_from_ns = 0
        return True

    plant.replace(FailureDetector, "turn", planted)


def replay_forgets_an_event(plant: Planter) -> None:
    """Gauges are left out of a replay: the state then differs in what it has seen last."""
    stamped = log_replay.stamped

    def planted(record: Any) -> Any:
        found = stamped(record)
        if isinstance(found.event, ev.TokenProgress):
            gauge = ev.TokenProgress(tokens_total=0, kv_used_tokens=0, running=0, waiting=0)
            return type(found)(
                seq=found.seq,
                time_ns=found.time_ns,
                peer=found.peer,
                incarnation=found.incarnation,
                peer_seq=found.peer_seq,
                event=gauge,
            )
        return found

    plant.replace(log_replay, "stamped", planted)


def decision_depends_on_what_ran_before(plant: Planter) -> None:
    """A counter of the process, not of the log, chooses among equal replicas."""
    calls = [0]

    def planted(index: ReplicaIndex, kinds: Collection[Kind], room: int, but: Any = ()) -> Any:
        calls[0] += 1
        able = list(index.with_room(kinds) if room else index.numbers_of(kinds))
        return index.replicas[able[calls[0] % len(able)]] if able else None

    plant.replace(ReplicaIndex, "least", planted)


def timer_clock_starts_at_zero_after_a_restart(plant: Planter) -> None:
    """The log's time stands still until the new process is as old as the run."""
    init = tick.Tick.__init__

    def planted(self: tick.Tick, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._time_start_ns = 0

    plant.replace(tick.Tick, "__init__", planted)


def node_is_lost_while_its_processes_speak(plant: Planter) -> None:
    judge_node = FailureDetector._judge_node

    def planted(self: FailureDetector, node: Any, silent_ns: int, quiet_ns: Any) -> Any:
        return judge_node(self, node, silent_ns, None)

    plant.replace(FailureDetector, "_judge_node", planted)


def silent_node_is_relied_on(plant: Planter) -> None:
    """Who is lost is waited for, as if somebody would start it again."""
    plant.replace(membership, "_missed_by_its_node", lambda ctx, name, reason: False)


def exception_of_the_core_is_swallowed(plant: Planter) -> None:
    """The message counts as received, and the log never hears of it."""
    apply = tick.Tick._apply

    def planted(self: tick.Tick, *args: Any) -> None:
        try:
            apply(self, *args)
        except HandlingFailed:
            self.bad_frames += 1

    plant.replace(tick.Tick, "_apply", planted)


def poison_event_is_tried_for_ever(plant: Planter) -> None:
    plant.replace(crashes, "CRASHES_MAX", 1_000)


def full_disk_is_not_waited_for(plant: Planter) -> None:
    over = Over(exit_codes.LOG_UNWRITABLE, "the disk is full")
    plant.replace(Restarts, "_no_room", lambda self, now_s: over)


# --- books ------------------------------------------------------------------------------------


def tokens_of_restarts_are_not_counted(plant: Planter) -> None:
    close = groups._close

    def planted(ctx: Context, ending: cmd.Ending, num_tokens: int, tokens_lost: int) -> None:
        close(ctx, ending, num_tokens, 0)

    plant.replace(groups, "_close", planted)


def relay_leases_the_oldest(plant: Planter) -> None:
    """Whatever version was asked for."""
    lease = SlotTable.lease

    def planted(self: SlotTable, version: int, reader: str, *, exact: bool) -> Any:
        return lease(self, min(self.versions_held, default=version), reader, exact=True)

    plant.replace(SlotTable, "lease", planted)


PLANTED: tuple[Callable[[Planter], None], ...] = (
    lost_work_only_to_admitting_replicas,
    closed_for_good_after_groups_per_version,
    bound_counted_from_the_next_batch_on,
    skipped_publish_is_not_owed,
    owed_publish_is_not_paid,
    batch_chosen_without_preserving_the_bound,
    dropped_group_keeps_its_place,
    nobody_acts_when_a_batch_waits,
    start_over_is_never_allowed,
    prompt_is_skipped_while_an_evaluation_is_due,
    lost_evaluation_is_forgotten,
    placement_is_not_raised,
    old_placement_is_believed,
    fenced_words_are_believed,
    killer_prompts_are_not_quarantined,
    store_lets_lower_placements_write,
    retry_goes_on_with_old_tokens,
    rewards_of_a_lost_replica_are_forgotten,
    dead_replica_keeps_its_work,
    draining_replica_is_not_emptied_before_a_pull,
    new_process_keeps_the_old_incarnation,
    splice_is_not_sent,
    rejoined_relay_is_not_fed,
    owed_republish_is_forgotten,
    missing_version_is_not_waited_for,
    slow_relay_leaves_the_chain_broken,
    commands_have_no_deadline,
    overdue_pull_is_left_alone,
    overdue_restart_is_left_alone,
    overdue_link_is_left_alone,
    overdue_transfer_is_left_alone,
    commands_leave_before_the_sync,
    sync_is_left_out,
    decisions_are_not_logged,
    server_takes_a_number_twice,
    event_is_lost_between_link_and_machine,
    nothing_is_sent_again,
    actor_forgets_its_commands,
    outstanding_commands_are_not_repeated,
    last_number_of_a_peer_is_not_restored,
    stale_server_is_believed,
    silence_is_judged_after_half_a_lease,
    silence_is_judged_without_grace,
    replay_forgets_an_event,
    decision_depends_on_what_ran_before,
    timer_clock_starts_at_zero_after_a_restart,
    node_is_lost_while_its_processes_speak,
    silent_node_is_relied_on,
    exception_of_the_core_is_swallowed,
    poison_event_is_tried_for_ever,
    full_disk_is_not_waited_for,
    tokens_of_restarts_are_not_counted,
    relay_leases_the_oldest,
)
