"""Directed tests that show which event leads to which command where random runs never do.

Reads   what handlers say that they lead to (LISTED)
Gives   `STORIES`, and what machines handle while one is told (`recorded`, `pairs`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from laminar.core.machine import HANDLING, Machine
from laminar.core.rules import NEW_RUN
from laminar.events.base import Command, Event, Stamped
from tests.core import (
    test_batch_wait,
    test_checkpoints,
    test_evaluation,
    test_given_up_events,
    test_handover,
    test_lifecycle,
    test_lost_replica,
    test_membership,
    test_redo,
    test_relays,
    test_resumption,
    test_rewards,
    test_silent_nodes,
    test_ways_to_lose,
    test_weight_versions,
)

Pair = tuple[type[Event], type[Command]]
LISTED: set[Pair] = {(event, c) for event, found in HANDLING.items() for c in found.leads_to}

_ways = test_ways_to_lose
STORIES: tuple[Callable[[], None], ...] = (
    *(
        partial(_ways.test_loss_of_a_single_role_stops_everybody, w, "trainer-0", NEW_RUN)
        for w in _ways.WAYS_OF_ALL
    ),
    *(
        story
        for way in _ways.WAYS
        for story in (
            partial(_ways.test_work_and_rewards_go_to_the_other_replica, way),
            partial(_ways.test_empty_replica_is_reserved_for_lost_work, way),
            partial(_ways.test_third_death_completes_a_batch, way, "deadline"),
            partial(_ways.test_third_death_completes_a_batch, way, "strategies.py:mine"),
            partial(_ways.test_third_death_of_the_last_prompt_ends_the_data, way),
            partial(_ways.test_third_death_of_the_last_evaluation_answer_ends_the_evaluation, way),
        )
    ),
    test_batch_wait.test_prompt_that_is_given_up_as_the_last_one_ends_the_data,
    test_relays.test_evaluation_moves_on_when_its_version_was_evicted_on_its_arrival,
    test_relays.test_export_that_went_to_a_dead_head_is_published_again,
    test_relays.test_lost_work_waits_until_the_last_relay_has_evicted_its_version,
    test_relays.test_other_bytes_are_found_when_the_publication_comes_later,
    test_relays.test_relay_that_is_never_restarted_is_spliced_out,
    test_relays.test_relay_that_holds_up_every_transfer_goes_to_the_end,
    test_resumption.test_held_out_answers_are_given_again,
    test_rewards.test_failure_of_the_last_prompt_ends_the_data,
    test_checkpoints.test_refused_checkpoint_is_read_by_nobody_else,
    test_checkpoints.test_checkpoint_of_an_evaluation_that_is_refused_gives_its_answers_up,
    test_checkpoints.test_lost_work_whose_checkpoint_is_removed_starts_over,
    test_checkpoints.test_checkpoint_is_loaded_without_a_relay,
    test_evaluation.test_evaluation_moves_on_when_the_relay_comes_back_without_its_version,
    test_evaluation.test_open_answers_are_given_up_with_their_version,
    test_evaluation.test_open_answers_are_given_up_when_their_version_is_gone_at_the_load,
    test_evaluation.test_version_gone_before_it_was_pinned_moves_to_the_newest,
    test_given_up_events.test_event_that_is_given_up_before_anything_began_stops_everybody,
    test_given_up_events.test_event_that_is_given_up_ends_the_run_by_its_name,
    test_handover.test_destination_that_is_gone_makes_lost_work,
    test_lifecycle.test_drain_while_exporting_gives_up_a_running_evaluation,
    test_lifecycle.test_drain_while_starting_ends_at_once,
    test_lifecycle.test_start_that_does_not_come_about_names_what_is_missing,
    test_lost_replica.test_replica_whose_last_answer_fails_pulls_what_is_newer,
    test_lost_replica.test_version_gone_during_a_reserved_pull,
    test_lost_replica.test_version_gone_for_an_evaluation_pulls_what_there_is,
    test_lost_replica.test_version_that_is_evicted_while_lost_work_waits_for_it_is_not_waited_for,
    test_membership.test_joining_while_the_run_ends_is_refused,
    test_redo.test_a_strategy_is_asked_when_it_is_back,
    test_redo.test_a_trainer_that_was_away_when_the_user_stopped_the_run_exports_what_there_is,
    partial(test_redo.test_a_run_whose_checkpoints_are_gone_cannot_go_on, 2),
    partial(test_redo.test_a_run_whose_checkpoints_are_gone_cannot_go_on, 3),
    partial(
        test_silent_nodes.test_who_was_lost_before_its_node_was_found_silent_is_gone_as_well,
        test_ways_to_lose.silent,
    ),
    test_silent_nodes.test_run_that_has_not_begun_ends_when_nobody_restarts_its_relay,
    test_weight_versions.test_group_that_is_finished_during_an_owed_publish_is_trained_after_it,
)


def pairs(log: list[tuple[Stamped, list[Command]]]) -> set[Pair]:
    return {(type(stamped.event), type(c)) for stamped, commands in log for c in commands}


@contextmanager
def recorded() -> Iterator[list[tuple[Stamped, list[Command]]]]:
    """What any Machine handles meanwhile."""
    log: list[tuple[Stamped, list[Command]]] = []
    handle = Machine.handle

    def recording(machine: Machine, stamped: Stamped) -> list[Command]:
        commands = handle(machine, stamped)
        log.append((stamped, commands))
        return commands

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "handle", recording)
        yield log
