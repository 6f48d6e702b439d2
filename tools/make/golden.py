"""Make the golden logs: stored runs that every version of this program must replay.

Usage: python tools/make/golden.py [--all]
Reads   tests/golden: which of its logs still replay
Writes  tests/golden, as a whole, if one does not, or with --all; LOGIC_VERSION in
        laminar/core/rules.py, raised if its logs were written with it

Each recipe lists its faults and the marks that its run must show. The seed in the manifest is tried
first, then the lowest one that shows them, so the command works even after a change of the product
has changed every run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.core.rules import LOGIC_VERSION  # noqa: E402
from laminar.eventlog.reader import read_raw_log  # noqa: E402
from tools.check.rows.golden import (  # noqa: E402
    GOLDEN,
    MANIFEST,
    Golden,
    disk_of,
    follow,
    manifest,
    packed,
    problem,
)
from tools.kit.sim_worlds import PACKED, SMALL, config  # noqa: E402
from tools.simulator.disk import SimDisk  # noqa: E402
from tools.simulator.run import make_world  # noqa: E402
from tools.simulator.world import World  # noqa: E402

SEEDS = 300
TIDIED = "tidied"  #: mark in addition to the simulator's: a segment was compressed
RULES = ROOT / "laminar" / "core" / "rules.py"


class Recipe(NamedTuple):
    """A run to search for."""

    name: str
    what: str
    faults: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()  #: marks of tools/simulator/coverage.py, TIDIED
    changes: dict[str, Any] = {}  # noqa: RUF012  (of SMALL; never written to)


RUNS = (
    Recipe("calm", "no faults", (), (TIDIED,), {"calm_share": 1.0}),
    Recipe(
        "replicas_lost",
        "replicas die, leave and complain; their work resumes elsewhere or restarts",
        ("replica-dies", "replica-leaves", "replica-complains"),
        ("event:ActorFailed", "event:ActorLeft", "event:ProcessExited", "dropped:restarted"),
    ),
    Recipe(
        "zombies",
        "replicas that were given up come back and are refused",
        ("replica-paused", "partition-one-way", "replica-replaced"),
        ("event:HeartbeatLost", "ActorJoined -> RefuseActor", "HeartbeatLost -> RestartActor"),
    ),
    Recipe(
        "killed_often",
        "the coordinator is killed between turns, again and again",
        ("coordinator-killed",),
        ("log:taken-over", "log:snapshot-start"),
        {"every_s": 1.0},
    ),
    Recipe(
        "power_cuts",
        "the coordinator's machine loses power while it writes",
        ("coordinator-cut",),
        ("log:torn-tail", "log:decisions-of-the-dead-completed"),
        {"every_s": 1.0},
    ),
    Recipe(
        "late_pulls",
        "messages get stuck, and a version is evicted before a replica pulls it",
        ("swizzle-clog", "partition"),
        ("event:VersionMissing",),
    ),
    Recipe(
        "weights_missing",
        "publishes are skipped, and weights arrive corrupt",
        ("publish-skipped", "weights-corrupt", "replica-slow"),
        ("event:PublishSkipped", "event:WeightsRejected"),
        {"max_staleness": 4, "replicas": 4},
    ),
    Recipe(
        "weights_in_flight",
        "replicas are lost during a load or load corrupt weights; their work resumes elsewhere",
        ("lost-in-load", "load-proves-wrong", "evaluation-in-load", "coordinator-killed-in-load"),
        (
            "fault:lost-in-load",
            "fault:load-proves-wrong",
            "fault:evaluation-in-load",
            "fault:coordinator-killed-in-load",
            "event:WeightsRejected",
            "WeightsRejected -> GenerateTrajectory",
        ),
        {"weight_update": "in-flight", "max_staleness": 4},
    ),
    Recipe(
        "checkpoints",
        "a version that no relay has is loaded from its checkpoint, or cannot be",
        ("replica-dies", "weights-corrupt"),
        ("event:CheckpointRefused", "CheckpointRefused -> PullWeights"),
        {"save_freq": 1, "max_staleness": 4, "train_batch_size": 1, "num_train": 20, "every_s": 2},
    ),
    Recipe(
        "rewards_fail",
        "siblings are refused, rewards fail, a prompt kills its replicas; rewards of groups",
        ("reward-fails", "sibling-refused", "poison-prompt"),
        ("dropped:quarantined", "event:TrajectoryFailed"),
        {"scope": "group", "num_train": 20},
    ),
    Recipe(
        "engine_differs",
        "the trainer leaves out rows, or whole batches, that did not come from their version",
        ("engine-differs",),
        ("dropped:mismatch",),
    ),
    Recipe(
        "filtered",
        "groups without variance are dropped, and other prompts replace them",
        ("replica-dies", "reward-fails"),
        ("dropped:no-variance",),
        {"filter": "score", "max_num_gen_batches": 10, "num_train": 20},
    ),
    Recipe(
        "hangs",
        "trajectories hang, and batches wait for them",
        ("hangs", "replica-slow"),
        ("dropped:restarted", "TimerFired -> AbortTrajectories"),
        {"batch_timeout_s": 5.0},
    ),
    Recipe(
        "stalled",
        "a step never ends: the trainer is restarted, and its steps are repeated",
        ("trainer-hangs",),
        ("event:RunStalled", "event:WorkProgress"),
        {"save_freq": 1, "train_s": 80.0},
    ),
    Recipe(
        "relays_lost",
        "relays die, are spliced out and come back, also that of the trainer's machine",
        ("relay-dies", "relay-replaced"),
        ("event:RelayLinked", "RelayReady -> ForwardWeights", "RelayReady -> PublishWeights"),
        {"nodes": 3, "replicas": 3},
    ),
    Recipe(
        "chunks_damaged",
        "weights arrive damaged at a relay, which requests them again",
        ("chunk-damaged", "relay-slow"),
        ("event:TransferProblem",),
    ),
    Recipe(
        "nodes_silent",
        "nodes are silent for longer than their lease while their replicas work, and die",
        ("node-silent", "replica-dies"),
        ("event:NodeSilent", "event:NodeRecovered"),
        {"seconds": 60.0, "num_train": 20},
    ),
    Recipe(
        "evaluation_sampled",
        "three samples of each evaluation prompt, some lost with their replica",
        ("replica-dies",),
        ("dropped:replica-lost",),
        {"n": 3, "every_s": 1.0},
    ),
    Recipe(
        "warned",
        "a replica rejects weights, and the user is warned",
        ("weights-corrupt",),
        ("event:TrainingWarning", "event:WeightsRejected"),
    ),
    Recipe(
        "turns",
        "responses have turns; sessions are lost with their hosts, and calls run at most once",
        ("host-dies",),
        ("event:TurnRequested", "dropped:env-lost"),
        {
            "environment_share": 1.0,
            "call_semantics": "at-most-once",
            "answer_s": 0.3,
            "num_train": 14,
        },
    ),
    Recipe("drained", "it was asked to stop", ("drain",), ("event:DrainRequested",)),
    Recipe(
        "own_strategy",
        "the user's function proposes the batches, sometimes nonsense",
        ("replica-dies",),
        ("event:BatchProposed", "ignored:unusable-proposal"),
        {"batch_strategy": "strategies.py:mine", "num_train": 14},
    ),
    Recipe(
        "repacked",
        "trajectories of stragglers migrate",
        ("replica-dies",),
        ("event:TrajectoriesReleased",),
        {**PACKED, "num_train": 20},
    ),
    Recipe(
        "trainer_lost",
        "the trainer dies, loads a checkpoint, and repeats the steps after it",
        ("trainer-dies",),
        ("event:CheckpointLoaded", "event:StepRepeated"),
        {"save_freq": 2, "num_train": 20},
    ),
    Recipe(
        "run_resumed",
        "all processes die at once, and the run resumes with new ones",
        ("run-dies",),
        ("event:RunResumed",),
        {"save_freq": 1, "every_s": 5.0},
    ),
    Recipe(
        "run_paused",
        "the run pauses after completing and saving a step, then resumes",
        ("run-pauses",),
        ("StepCompleted -> SaveCheckpoint", "CheckpointSaved -> StopActor", "event:RunResumed"),
        {"save_freq": 3, "every_s": 5.0},
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="also if all logs still replay")
    arguments = parser.parse_args()
    old = manifest() if (GOLDEN / MANIFEST).exists() else []
    broken = [golden for golden in old if _problem(golden)]
    if old and not broken and not arguments.all:
        print(f"all {len(old)} golden logs replay: nothing is changed")
        return 0
    if broken and any(_logic(golden) == LOGIC_VERSION for golden in broken):
        _raise_logic()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    make(GOLDEN, {golden.name: golden.seed for golden in old})
    return 0


def _problem(golden: Golden) -> str:
    """Return why a log cannot stay, or an empty string if it can."""
    path = GOLDEN / golden.file
    said = problem(golden, disk_of(path)) if path.exists() else f"{golden.name}: does not exist"
    if said:
        print(said, file=sys.stderr)
    return said


def _logic(golden: Golden) -> int:
    """Return the logic version that wrote a log, or -1 if the log is missing."""
    path = GOLDEN / golden.file
    return (
        max(r["logic"] for _, _, r in read_raw_log(disk_of(path)) if "logic" in r)
        if path.exists()
        else -1
    )


def _raise_logic() -> None:
    """Raise LOGIC_VERSION, because the decisions differ from those of the logs."""
    old, new = f"LOGIC_VERSION = {LOGIC_VERSION} ", f"LOGIC_VERSION = {LOGIC_VERSION + 1} "
    text = RULES.read_text()
    if text.count(f"\n{old}") != 1:
        raise SystemExit(f"{RULES} has no line {old!r}")
    RULES.write_text(text.replace(f"\n{old}", f"\n{new}"))
    print(f"{RULES.relative_to(ROOT)}: {old.strip()} -> {LOGIC_VERSION + 1}", file=sys.stderr)


def make(folder: Path, seeds: dict[str, int]) -> None:
    """Replace the logs of a folder and its manifest; `seeds`, by name, are tried first."""
    folder.mkdir(exist_ok=True)
    made = []
    for recipe in RUNS:
        seed, disk = run(recipe, seeds.get(recipe.name, 1))
        path = folder / f"{recipe.name}.zst"
        path.write_bytes(packed({name: disk.read(name) for name in disk.list_names()}))
        facts = follow(disk_of(path))
        made.append(Golden(name=recipe.name, what=recipe.what, seed=seed, facts=facts))
    for path in folder.glob("*.zst"):
        if path.stem not in {golden.name for golden in made}:
            path.unlink()
    text = msgspec.json.format(msgspec.json.encode(made)).decode()
    (folder / MANIFEST).write_text(text + "\n")


def run(recipe: Recipe, first: int = 1) -> tuple[int, SimDisk]:
    """Return the first seed whose run shows the recipe's marks, and the coordinator's disk."""
    for seed in (first, *range(1, SEEDS + 1)):
        world = make_world(config(*recipe.faults, **{**SMALL, **recipe.changes}), seed)
        world.run()
        if set(recipe.shows) <= _shown(world):
            print(f"{recipe.name}: seed {seed}, {world.checks.events} events", file=sys.stderr)
            return seed, world.coordinator.disk
    raise AssertionError(f"{recipe.name}: no run of {SEEDS} shows {', '.join(recipe.shows)}")


def _shown(world: World) -> set[str]:
    shown, names = set(world.coverage.counts), world.coordinator.disk.list_names()
    return shown | ({TIDIED} if any(name.endswith(".zst") for name in names) else set())


if __name__ == "__main__":
    sys.exit(main())
