"""The simulator can find bugs: each planted one breaks a promise within a few seeds.

With the faults that bring it out; row 5 of the scorecard lets the whole swarm look for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.sim.run import run_seed
from tests.kit.sim_worlds import config
from tools.rows import (
    planted,
    planted_node,
    planted_redo,
    planted_relays,
    planted_store,
    planted_trainer,
)
from tools.rows.mutants import BUGS
from tools.rows.planted import Planter

SEEDS = 30  #: of which the likely one comes first; which it is changes with the order of things
EVENTS_MAX = 8_000  #: several times what one of these runs needs


@pytest.mark.parametrize(
    ("plant", "faults", "likely"),
    [
        (planted.sync_is_left_out, (), 0),
        (planted_redo.one_row_is_left_out_of_a_redo, ("trainer-dies",), 7),
        (planted_redo.payloads_go_that_a_redo_needs, ("trainer-dies",), 23),
        (planted_redo.redo_is_published, ("trainer-dies",), 7),
        (planted_redo.checkpoint_ahead_of_the_log_is_loaded, ("trainer-dies-unheard",), 1),
        (
            planted_redo.old_checkpoint_goes_before_the_log_has_the_new_one,
            ("trainer-dies-unheard",),
            7,
        ),
        (planted.event_is_lost_between_link_and_machine, (), 0),
        (planted.actor_forgets_its_commands, ("coordinator-killed",), 0),
        (planted.store_lets_lower_placements_write, ("partition",), 18),
        (planted.silence_is_judged_after_half_a_lease, ("partition",), 0),
        (planted.fenced_words_are_believed, ("replica-paused", "coordinator-paused"), 18),
        (planted.lost_work_only_to_admitting_replicas, ("replica-dies",), 0),
        (planted.skipped_publish_is_not_owed, ("publish-skipped",), 18),
        (planted.prompt_is_skipped_while_an_evaluation_is_due, ("replica-slow",), 10),
        (planted.timer_clock_starts_at_zero_after_a_restart, ("coordinator-killed",), 0),
        (planted.silent_node_is_relied_on, ("node-dies", "replica-dies"), 10),
        (planted.node_is_lost_while_its_processes_speak, ("node-silent",), 10),
        (planted.exception_of_the_core_is_swallowed, ("event-crashes",), 0),
        (planted.poison_event_is_tried_for_ever, ("event-poison",), 7),
        (planted.full_disk_is_not_waited_for, ("disk-full",), 0),
        (planted.batch_chosen_without_preserving_the_bound, ("hangs", "replica-slow"), 25),
        (planted.dropped_group_keeps_its_place, ("reward-fails",), 0),
        (planted.killer_prompts_are_not_quarantined, ("poison-prompt",), 25),
        (planted.dead_replica_keeps_its_work, ("replica-dies",), 7),
        (planted.splice_is_not_sent, ("relay-lost-in-transfer",), 7),
        (planted.rejoined_relay_is_not_fed, ("relay-paused",), 0),
        (planted.owed_republish_is_forgotten, ("relay-dies",), 0),
        (planted.placement_is_not_raised, ("replica-dies",), 0),
        (planted.overdue_restart_is_left_alone, ("evaluation-stalls",), 7),
        (planted.overdue_transfer_is_left_alone, ("transfer-never-ends",), 8),
        (planted_node.engine_that_does_not_come_up_is_not_missed, ("start-hangs",), 21),
        (planted_node.exit_is_not_reported, ("replica-dies",), 17),
        (planted_node.exit_is_reported_twice, ("replica-dies",), 0),
        (planted_node.ended_process_is_not_started_again, ("replica-dies",), 22),
        (planted_node.node_leaves_before_its_processes, (), 18),
        (planted_node.dead_node_is_not_started_again, ("machine-restarts",), 1),
        (planted_node.new_node_forgets_a_process, ("machine-restarts",), 8),
        (planted_node.processes_of_a_new_node_are_refused, ("machine-restarts",), 0),
        (
            planted_node.node_of_the_store_is_refused_while_the_run_ends,
            ("machine-dies-in-phase",),
            7,
        ),
        (planted_relays.damaged_chunk_is_accepted, ("chunk-damaged",), 0),
        (planted_relays.slot_is_committed_before_its_digest, (), 0),
        (planted_relays.leases_of_the_lost_are_kept, ("replica-dies",), 20),
        (planted_relays.predecessor_of_before_is_obeyed, ("relay-cut-off",), 22),
        (planted_store.answers_leave_before_the_commit, (), 0),
        (planted_trainer.step_is_reported_before_its_line_is_in_the_book, (), 1),
        (planted_trainer.checkpoint_has_its_name_before_its_sync, ("trainers-disk-full",), 7),
        (planted_trainer.refused_slot_counts_as_published, ("relay-dies",), 26),
        (planted_trainer.skipped_publish_is_not_reported, ("publish-skipped",), 18),
        (planted_store.full_disk_loses_the_ends, ("store-full",), 0),
        (planted_store.ends_that_come_during_a_write_are_forgotten, ("store-full",), 7),
        (planted_store.orders_die_with_the_store, ("store-dies",), 0),
        (planted_store.orders_keep_the_address_of_the_dead_store, ("store-dies",), 0),
    ],
)
def test_planted_bug_is_found(
    plant: Callable[[Planter], None], faults: tuple[str, ...], likely: int
) -> None:
    swarm = config(*faults, events_max=EVENTS_MAX)
    with Planter() as planter:
        plant(planter)
        assert any(run_seed(swarm, seed).invariant for seed in (likely, *range(SEEDS)))


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_has_what_it_is_planted_into(name: str) -> None:
    """Names that a bug replaces change; the whole list is tried for a release only."""
    with Planter() as planter:
        BUGS[name](planter)
