"""Four policies for the responses of a run that dies and is resumed, under one schedule of faults.

Usage: python -m tools.bench.resume_policies [--seeds 5] [--steps 30] [--every 300] [POLICY ...]
Prints a line per policy, mean and standard deviation over the seeds: prompts lost, tokens generated
again per 1,000 trained, mean length of what was trained relative to that of all prompts that ended,
and virtual seconds until the last step.

drop      the place in the data is saved, responses are not: those not trained yet are lost
reissue   their prompts begin from scratch
snapshot  as reissue, but responses that had finished at the last snapshot, every 120 s, are kept
continue  from the tokens in the store, which lacks up to the last half second
laminar   the same in Laminar, with its real parts in the simulator

Prompts, lengths, engines, training times and fault times of a seed are equal, and each step has a
checkpoint. The first four are a model, whose processes sample again DOWN_S after a fault, and whose
staleness bound takes a prompt as new if a response of it begins again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from heapq import heappop
from statistics import fmean, stdev

from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.events.reasons import DropReason, EndKind
from laminar.names import ids
from tools.bench.repack.in_flight import PUBLISHED, TRAINED, Batch, InFlight
from tools.bench.repack.measures import GROUP_SIZE, SECOND, Setup
from tools.bench.slow_tools import world_of
from tools.simulator.models.replica import Replica
from tools.simulator.run import make_world
from tools.simulator.world import World

POLICIES, LAMINAR = ("drop", "reissue", "snapshot", "continue"), "laminar"
SNAPSHOT_S, PROGRESS_S, DOWN_S = 120.0, 0.5, 10.0
TIMING = EngineTiming(step_us=25_000.0, sequence_us=0.0)
LENGTHS = ResponseLengths(median=400, limit=8_000)
SETUP = Setup(
    replicas=4, staleness=2, policy="", max_batch=0, timing=TIMING, lengths=LENGTHS, seed=0,
    warm_steps=0, steps=0, slots=32, groups_per_step=4, start_s=1.0, train_s=8.0, publish_s=0.1,
    load_s=0.1,
)  # fmt: skip
FAULT = -4  #: kind of scheduled event, next to those of InFlight
Seen = dict[str, float]  #: measures of one run


def fault_times(seed: int, every_s: float) -> Iterator[int]:
    """Yield the times of a seed's faults, nanoseconds, at least a third of the mean apart."""
    chance, now = random.Random(f"resume/{seed}"), 0.0
    while True:
        now += every_s / 3 + chance.expovariate(1.5 / every_s)
        yield int(now * SECOND)


class Resumed(InFlight):
    """The model of a run, with faults and a policy."""

    def __init__(self, seed: int, policy: str, every_s: float) -> None:
        super().__init__(SETUP._replace(seed=seed))
        self._policy, self._chance = policy, random.Random(f"lost/{seed}")
        self._faults = fault_times(seed, every_s)
        self._finished: dict[str, int] = {}  #: when each response finished
        self._taken: list[int] = []  #: groups of the last batch
        self._again, self._lost = 0, set[int]()  #: tokens; prompts

    def measure(self, steps: int) -> Seen:
        for number, begins in enumerate(self._begins):
            self._at(begins, number)
        self._at(next(self._faults), FAULT)
        act = {FAULT: self._fail, TRAINED: self._trained, PUBLISHED: self._load}
        while self._completed < steps:
            self.now, what, plan = heappop(self._heap)
            if what in act:
                act[what]()
            elif plan == self._plans[what]:
                self._change(what)
            self._train()
        ended = {*range(self._begun)} - {*self._groups} - {*(self._taken if self._training else ())}
        trained = [sum(self._totals(order)) for order in ended - self._lost]
        length = fmean(trained) / fmean(sum(self._totals(order)) for order in ended)
        again, seconds = 1e3 * self._again / sum(trained), self.now / SECOND
        return Seen(lost=len(self._lost), again=again, length=length, seconds=seconds)

    def _totals(self, order: int) -> list[int]:
        """Return the lengths of a prompt's responses."""
        group = ids.train_group(0, order)
        seeds = (ids.trajectory_seed(self.setup.seed, group, i, 1) for i in range(GROUP_SIZE))
        return [LENGTHS.draw_length(seed) for seed in seeds]

    def _end(self, batch: Batch) -> None:
        batch.advance_to(float(self.now))
        self._finished |= dict.fromkeys(batch.finished, self.now)
        super()._end(batch)

    def _train(self) -> None:
        chosen, ready = self._chosen, self._ready[: SETUP.groups_per_step]
        super()._train()
        self._taken = ready if self._chosen > chosen else self._taken

    def _fail(self) -> None:
        """End all processes, and resume: the step that was being trained is trained again."""
        running: dict[str, int] = {}
        for batch in self.batches:
            self._end(batch)
            running |= batch.unfinished()
        if self._training:
            self._chosen -= 1
            self._groups |= zip(self._taken, self._training, strict=True)
            self._training = []
        failed, self.now = self.now, self.now + int(DOWN_S * SECOND)
        self._heap = [
            (max(w, self.now), what, -1) for w, what, _ in self._heap if what == PUBLISHED
        ]
        self._at(max(next(self._faults), self.now), FAULT)
        self.batches = [Batch(TIMING, SETUP.slots) for _ in self.batches]
        self._ready, self._deadlines, self._refused = [], {}, (0, 0)
        if self._policy == "drop":
            self._lost |= self._groups.keys()
            self._groups.clear()
        for order in sorted(self._groups):
            self._resume_group(order, running, failed)
        numbers = [*range(len(self.batches))]
        self._fill(numbers)
        for number in numbers:
            self._plan(number)

    def _resume_group(self, order: int, running: dict[str, int], failed: int) -> None:
        """Let an untrained group continue from the tokens that outlive the fault."""
        group = self._groups[order]
        group.unfinished = group.tokens = group.steps = 0
        for sibling, total in enumerate(self._totals(order)):
            name = f"{order}.{sibling}.{total}"
            there, finished = running.get(name, total), name not in running
            kept = self._keep_tokens(there, self._finished[name] if finished else None, failed)
            self._again += there - kept
            if kept == total:
                group.tokens += total
            else:
                group.unfinished += 1
                batch = self.batches[order % len(self.batches)]
                batch.add(name, 0, kept, total, float(self.now))
        if group.unfinished and self._policy != "continue":
            group.step = self._step
        if not group.unfinished:
            self._ready.append(order)
        deadline = group.step + SETUP.staleness
        self._deadlines[deadline] = self._deadlines.get(deadline, 0) + 1

    def _keep_tokens(self, there: int, finished: int | None, failed: int) -> int:
        """Return how many of a response's tokens outlive a fault."""
        if self._policy == "continue":
            unsaved = round(self._chance.uniform(0, PROGRESS_S) * 1e6 / TIMING.step_us)
            return there if finished is not None else max(0, there - unsaved)
        last = failed - failed % int(SNAPSHOT_S * SECOND)
        saved = self._policy == "snapshot" and finished is not None and finished <= last
        return there if saved else 0


def run_laminar(seed: int, steps: int, every_s: float) -> Seen:
    """Run Laminar itself in the simulator until this step."""
    choices = world_of("in-flight", SETUP.staleness, 0.0) | {
        "world.environment_share": 0.0, "world.p99_to_median": LENGTHS.p99_to_median,
        "world.load_s": SETUP.load_s, "data.max_response_length": LENGTHS.limit,
        "data.train_batch_size": SETUP.groups_per_step, "rollout.replicas": SETUP.replicas,
        "rollout.max_num_seqs": SETUP.slots, "rollout.group_size": GROUP_SIZE,
        "rollout.groups_per_version": SETUP.slots // GROUP_SIZE,
        "rollout.progress_interval_ms": int(PROGRESS_S * 1_000), "trainer.save_freq": 1,
        "trainer.max_ckpt_to_keep": 0, "emulation.median_response": LENGTHS.median,
        "emulation.train_s": SETUP.train_s, "store.payload_gb": 0.0,
    }  # fmt: skip
    again, faults = 0, fault_times(seed, every_s)
    with make_world(choices, seed) as world:
        world.begin()
        fault = next(faults)
        while (state := world.coordinator.state) is None or state.steps.completed < steps:
            world.scheduler.step()
            if world.scheduler.now >= fault:
                again, fault = again + count_unsaved(world), next(faults)
                world.begin_again()
        seconds = world.scheduler.now / SECOND
        ended = [(row.end, row.num_tokens) for row in world.rows.values() if row.end]
    again += state.work.ledger.tokens.dropped.get(DropReason.RESTARTED, 0)
    trained = [tokens for end, tokens in ended if end == EndKind.TRAINED]
    length = fmean(trained) / fmean(tokens for _, tokens in ended)
    lost = sum(state.work.ledger.groups.dropped.values())
    return Seen(lost=lost, again=1e3 * again / sum(trained), length=length, seconds=seconds)


def count_unsaved(world: World) -> int:
    """Count the tokens in the engines that the store has not got."""
    count, rows = 0, world.rows
    engines = [p.model.engine for p in world.rollouts if isinstance(p.model, Replica)]
    for clock in [engine.clock for engine in engines if engine is not None]:
        clock.advance_to_now()
        for sequence in clock.sequences.values():
            row = rows.get(sequence.id.partition("@")[0])
            count += max(0, clock.count_tokens(sequence) - (row.num_tokens if row else 0))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=float, default=300.0, help="mean seconds between faults")
    parser.add_argument("policies", nargs="*", default=[*POLICIES, LAMINAR])
    args = parser.parse_args()
    for policy in args.policies:
        seen = list[Seen]()
        for seed in range(1, args.seeds + 1):
            model = Resumed(seed, policy, args.every) if policy != LAMINAR else None
            seen.append(
                model.measure(args.steps) if model else run_laminar(seed, args.steps, args.every)
            )
        values = {name: [each[name] for each in seen] for name in seen[0]}
        figures = (f"{name} {fmean(v):.4g} ± {stdev(v):.2g}" for name, v in values.items())
        print(policy, *figures, sep="  ", flush=True)


if __name__ == "__main__":
    main()
