"""Cost of slow tools in tokens per second: 64 concurrent trajectories whose turns wait for them.

Usage: python -m tools.bench.slow_tools [--bounds 1000 4 2] [--p99 20 120] [--window 400]
Prints a line for each update mode, staleness bound and p99 of tool latency: tokens per second
relative to the same run without latency, and the reasons why engine slots were idle.

The actors, the coordinator and the store are the real ones, in the virtual time of the simulator;
engines are clocks. Two replicas run 32 sequences each at up to 40 tokens per second. A response has
one to four turns of 200 tokens in the median. Tool latency is log-normal with a median of 0.5 s and
below four times its p99. Hosts have the default number of sessions: twice as many as engines have
slots for, and a group each, or four times in flight. After 200 s tokens are counted for --window
seconds.

"idle": the share of engine slots in which nothing was sampled; then the shares of the reasons:
sessions (all sessions have a trajectory that waits for a tool), staleness (the bound allows no new
group), draining (a replica finishes its trajectories before it loads), other (loading).
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import NamedTuple

from laminar.core.scheduling.admission import find_full_resource, find_not_admitted_reason
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from tools.simulator.config import SWARM, Choices, load
from tools.simulator.faults.faults import KINDS
from tools.simulator.run import make_world
from tools.simulator.scheduler import SECOND

MEDIAN_S, NO_TIME_S = 0.5, 1e-4
WARM_S, LOOK_S = 200, 1
REPLICAS, SLOTS, GROUP_SIZE, GROUPS_PER_STEP = 2, 32, 8, 16
LONG_S = 36_000
UPDATES = ("in-flight", "drain")
REASONS = {"staleness-bound": "staleness", "draining": "draining", "sessions": "sessions"}


class Seen(NamedTuple):
    """Throughput and idle slots of one run."""

    tokens_per_s: float
    idle: float  #: share of idle slots
    wanted: dict[str, float]  #: shares of the reasons for idle slots

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.wanted.items())
        return f"{self.tokens_per_s:5.0f} tokens/s, idle {self.idle:4.0%} ({parts or 'nothing'})"


def world_of(update: str, bound: int, p99_s: float) -> Choices:
    """Return the config of a run without faults that does not end within the measured time."""
    return load(SWARM, KINDS) | {
        "data.max_response_length": 4_000,
        "data.train_batch_size": GROUPS_PER_STEP,
        "data.val_size": 0,
        "rollout.replicas": REPLICAS,
        "rollout.max_num_seqs": SLOTS,
        "rollout.group_size": GROUP_SIZE,
        "rollout.groups_per_version": REPLICAS * SLOTS // GROUP_SIZE,
        "rollout.weight_update": update,
        "rollout.kv_on_update": "keep",
        "async.max_staleness": bound,
        "reward.scope": "trajectory",
        "env.call_semantics": "at-most-once",
        "algorithm.batch_strategy": "deadline",
        "trainer.total_training_steps": 0,
        "trainer.test_freq": 0,
        "trainer.save_freq": 0,
        "trainer.batch_timeout_s": LONG_S,
        "recovery.resume_timeout_ms": 10_000,
        "repack.policy": "off",
        "emulation.step_us": 25_000.0,
        "emulation.sequence_us": 0.0,
        "emulation.median_response": 200,
        "emulation.train_s": 5.0,
        "world.nodes": 1,
        "world.num_train": 20_000,
        "world.fork_step": 0,
        "world.stall_ms": LONG_S * 1_000,
        "world.boundary_share": 0.0,
        "world.filter": "",
        "world.environment_share": 1.0,
        "world.answer_s": MEDIAN_S if p99_s else NO_TIME_S,
        "world.answer_p99_to_median": p99_s / MEDIAN_S,
        "world.delay_ms": 0.2,
        "world.start_s": 0.5,
        "world.transfer_s": 0.05,
        "world.load_s": 0.5,
        "world.score_s": 0.01,
        "world.p99_to_median": 3.0,
        "world.segment_bytes": 1 << 26,
        "world.snapshot_every": 1 << 30,
        "world.faults.calm_share": 1.0,
        "world.checks.invariants_every": 1 << 30,
        "world.checks.events_max": 1 << 40,
        "world.checks.quiet_s": LONG_S,
    }


def watch(choices: Choices, window_s: int) -> Seen:
    """Run a world and sample the coordinator's state every second."""
    wanted, free, looks, began = Counter[str](), 0, 0, 0
    with make_world(choices, 1) as world:
        world.begin()
        for second in range(0, WARM_S + window_s, LOOK_S):
            while world.scheduler.now < second * SECOND and not world.finished:
                world.scheduler.step()
            state = world.coordinator.state
            if state is None or second < WARM_S:
                continue
            began, looks = began or state.work.ledger.tokens.issued, looks + 1
            for name, slots in _free(state).items():
                wanted[name] += slots
                free += slots
        assert state is not None and not world.finished
        tokens = state.work.ledger.tokens.issued - began
    shares = {n: slots / free for n, slots in wanted.most_common() if slots > 0.01 * free}
    return Seen(tokens / window_s, free / (looks * REPLICAS * SLOTS), shares)


def _free(state: State) -> Counter[str]:
    """Count the free slots by the reason why they are idle."""
    found = Counter[str]()
    for replica in state.members.replicas.values():
        reason = find_not_admitted_reason(state, replica) or find_full_resource(state, replica)
        statuses = Counter(state.work.trajectories[name].status for name in replica.running)
        free = max(SLOTS - statuses[TrajectoryStatus.RUNNING], 0)
        found[REASONS.get(reason or "", "other")] += free
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[1000, 4, 2])
    parser.add_argument("--p99", type=float, nargs="+", default=[20, 120])
    parser.add_argument("--window", type=int, default=400)
    given = parser.parse_args()
    for update in UPDATES:
        for bound in given.bounds:
            at_once = watch(world_of(update, bound, 0.0), given.window)
            print(f"{update:9} bound {bound:4}  no latency      {at_once}", flush=True)
            for p99_s in given.p99:
                seen = watch(world_of(update, bound, p99_s), given.window)
                ratio = seen.tokens_per_s / at_once.tokens_per_s
                what = f"{update:9} bound {bound:4}  p99 {p99_s:3.0f} s"
                print(f"{what} {ratio:5.2f}  {seen}", flush=True)


if __name__ == "__main__":
    main()
