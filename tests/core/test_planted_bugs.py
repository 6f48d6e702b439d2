"""The invariants can fail: a rule of the design, taken out, is missed by some random world soon.

A rule whose absence nobody notices is either not needed or not tested.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.random_worlds import check_end, random_world
from tools.rows import planted
from tools.rows.planted import Planter

SEEDS = 60
EVENTS_MAX = 5_000  #: three times what the longest of these runs needs


@pytest.mark.parametrize(
    "plant",
    [
        planted.lost_work_only_to_admitting_replicas,
        planted.closed_for_good_after_groups_per_version,
        planted.bound_counted_from_the_next_batch_on,
        planted.skipped_publish_is_not_owed,
        planted.batch_chosen_without_preserving_the_bound,
        planted.dropped_group_keeps_its_place,
        planted.prompt_is_skipped_while_an_evaluation_is_due,
    ],
)
def test_planted_bug_is_found(plant: Callable[[Planter], None]) -> None:
    with Planter() as planter, pytest.raises(AssertionError):
        plant(planter)
        for seed in range(SEEDS):
            check_end(random_world(seed).run(EVENTS_MAX))
