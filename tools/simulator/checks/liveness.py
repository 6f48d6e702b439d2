"""A healed run does, after the faults, what is left in a time that has to do with the work.

Reads   a world that has ended, and one like it in which nothing goes wrong
Raises  Violation

The measure is the same world without any fault but a prompt that stays bad: each pass over the data
comes to it again. It is run only where a healed run was not quick anyway, and no further than it
takes to know that the healed run was quick enough.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.core.steps.batch_wait import WAITS_MAX
from laminar.core.store_orders import END_TIMEOUT_MS
from laminar.events.reasons import DropReason
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import START_TIMEOUT_MS, seconds
from tools.simulator.scheduler import MS, SECOND
from tools.simulator.turns import made_of
from tools.simulator.world import World

FACTOR = 10
QUICK_NS = seconds(30.0)
"""No whole run takes less than a tenth of this."""


def heals_in_time(world: World, without_faults: Callable[[], World]) -> None:
    """What was left when the faults ended took at most FACTOR times a whole run without faults.

    A sequence that hangs is noticed when a batch has waited for it, and they may be noticed one
    after the other. So may groups that take longer than a batch waits.
    """
    healing_ns = world.scheduler.now - _begin_ns(world)
    if not world.healed_ns or healing_ns <= QUICK_NS:
        return
    waits = world.faults.left_hanging + WAITS_MAX * _too_long(world)
    healing_ns -= waits * world.scenario.settings.batch_wait_ms * MS
    if healing_ns <= QUICK_NS:
        return
    with without_faults() as calm:
        calm.faults.poison = world.faults.poison
        calm.begin()
        scheduler, limit_ns = calm.scheduler, healing_ns // FACTOR
        while not calm.finished and scheduler.now <= limit_ns and scheduler.step():
            pass
    whole_ns = max(scheduler.now, QUICK_NS // FACTOR)
    if healing_ns > FACTOR * whole_ns:
        took, whole = healing_ns / SECOND, whole_ns / SECOND
        what = f"it took {took:.0f} s after the faults, and a whole run takes {whole:.0f} s"
        raise Violation("heals_in_time", what)


def _too_long(world: World) -> int:
    """Groups that were given up after everything had healed, with nothing wrong: every wait of the
    batch moves what is not finished, which loses the tokens that were not reported yet."""
    scenario, longest = world.scenario, dict[str, int]()
    for row in world.rows.values():
        if row.end_reason == DropReason.BATCH_WAIT and row.id not in world.faults.ended_before:
            tokens = sum(made_of(scenario, scenario.seed_of(row)).counts)
            longest[row.group_id] = max(tokens, longest.get(row.group_id, 0))
    token_ns, wait_ns = scenario.engine.step_ns(1), scenario.settings.batch_wait_ms * MS
    return sum(tokens * token_ns > wait_ns for tokens in longest.values())


def _begin_ns(world: World) -> int:
    """When everything has healed and whatever else had to pass has passed.

    What is never done has a deadline. A disk that stays full is waited for. A run that fails, or
    whose first machine stays away, may have waited for a process as long as a start takes, and
    then for the store.
    """
    state, scenario = world.coordinator.state, world.scenario
    begin_ns = max(world.healed_ns, world.faults.wedged_until_ns)
    if world.coordinator.over is not None:
        begin_ns += seconds(scenario.disk_wait_s)
    failed = state is not None and state.failed is not None
    first = world.processes[world.processes["store-0"].node]
    if failed or world.faults.dead_for_good(first):
        begin_ns += (START_TIMEOUT_MS + END_TIMEOUT_MS) * MS + world.checks.log_behind_ns
    return begin_ns
