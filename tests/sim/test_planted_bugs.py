"""The simulator can find bugs: each planted one breaks a promise within a few seeds.

With the faults that bring it out; row 5 of the scorecard lets the whole swarm look for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.sim.run import run_seed
from laminar.testing.sim_worlds import config
from tools.rows import planted, planted_node, planted_relays, planted_store, planted_trainer
from tools.rows.planted import Planter

SEEDS = 30
EVENTS_MAX = 8_000  #: several times what one of these runs needs


@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (planted.sync_is_left_out, ()),
        (planted.event_is_lost_between_link_and_machine, ()),
        (planted.actor_forgets_its_commands, ("coordinator-killed",)),
        (planted.store_lets_lower_placements_write, ("partition",)),
        (planted.silence_is_judged_after_half_a_lease, ("partition",)),
        (planted.fenced_words_are_believed, ("replica-paused", "coordinator-paused")),
        (planted.lost_work_only_to_admitting_replicas, ("replica-dies",)),
        (planted.skipped_publish_is_not_owed, ("publish-skipped",)),
        (planted.prompt_is_skipped_while_an_evaluation_is_due, ("replica-slow",)),
        (planted.timer_clock_starts_at_zero_after_a_restart, ("coordinator-killed",)),
        (planted.silent_node_is_relied_on, ("node-dies", "replica-dies")),
        (planted.node_is_lost_while_its_processes_speak, ("node-silent",)),
        (planted.exception_of_the_core_is_swallowed, ("event-crashes",)),
        (planted.poison_event_is_tried_for_ever, ("event-poison",)),
        (planted.full_disk_is_not_waited_for, ("disk-full",)),
        (planted.batch_chosen_without_preserving_the_bound, ("hangs", "replica-slow")),
        (planted.dropped_group_keeps_its_place, ("reward-fails",)),
        (planted.killer_prompts_are_not_quarantined, ("poison-prompt",)),
        (planted.dead_replica_keeps_its_work, ("replica-dies",)),
        (planted.splice_is_not_sent, ("relay-lost-in-transfer",)),
        (planted.rejoined_relay_is_not_fed, ("relay-paused",)),
        (planted.owed_republish_is_forgotten, ("relay-dies",)),
        (planted.placement_is_not_raised, ("replica-dies",)),
        (planted.overdue_transfer_is_left_alone, ("transfer-never-ends",)),
        (planted_node.exit_is_not_reported, ("replica-dies",)),
        (planted_node.exit_is_reported_twice, ("replica-dies",)),
        (planted_node.ended_process_is_not_started_again, ("replica-dies",)),
        (planted_node.node_leaves_before_its_processes, ()),
        (planted_relays.damaged_chunk_is_accepted, ("chunk-damaged",)),
        (planted_relays.slot_is_committed_before_its_digest, ()),
        (planted_relays.predecessor_of_before_is_obeyed, ("relay-cut-off",)),
        (planted_store.answers_leave_before_the_commit, ()),
        (planted_trainer.step_is_reported_before_its_line_is_in_the_book, ()),
        (planted_trainer.checkpoint_has_its_name_before_its_sync, ("trainers-disk-full",)),
        (planted_trainer.refused_slot_counts_as_published, ("relay-dies",)),
        (planted_trainer.skipped_publish_is_not_reported, ("publish-skipped",)),
        (planted_store.full_disk_loses_the_ends, ("store-full",)),
    ],
)
def test_planted_bug_is_found(plant: Callable[[Planter], None], faults: tuple[str, ...]) -> None:
    swarm = config(*faults, events_max=EVENTS_MAX)
    with Planter() as planter:
        plant(planter)
        assert any(run_seed(swarm, seed).invariant for seed in range(SEEDS))
