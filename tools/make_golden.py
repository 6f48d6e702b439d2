"""Makes the golden logs: runs that are kept, and that later versions of this program must replay.

Usage: python tools/make_golden.py
Reads   nothing: the runs are simulated
Writes  tests/golden: schema_N/* of the present schema N, refused/*, and MANIFEST.json

What a run must have gone through is written beside its faults, and the first seed that has done so
is taken. So the command works again after a change of the product has changed every run. When it
may be used: tests/golden/README.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.eventlog.reader import read_log  # noqa: E402
from laminar.eventlog.record import (  # noqa: E402
    SCHEMA_VERSION,
    DecisionRecord,
    EventRecord,
    Header,
    Record,
    StateHashRecord,
)
from laminar.events import codec  # noqa: E402
from laminar.events import commands as cmd  # noqa: E402
from laminar.events import events as ev  # noqa: E402
from laminar.sim.runtime.disk import SimDisk  # noqa: E402
from laminar.sim.world import World  # noqa: E402
from tests.kit.sim_worlds import SMALL, config  # noqa: E402
from tools import log_forms  # noqa: E402
from tools.rows.golden import GOLDEN, Golden, disk_of, follow, manifest, problem  # noqa: E402

SEEDS = 300
PRESENT = f"schema_{SCHEMA_VERSION}"
UNKNOWN = 99
FAILED = "failed"  #: beside the simulator's marks: the run ended with a failure
TIDIED = "tidied"  #: a segment was compressed


class Recipe(NamedTuple):
    """A run to look for."""

    name: str
    what: str
    faults: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()  #: marks of laminar/sim/checks/coverage.py, FAILED, TIDIED
    changes: dict[str, Any] = {}  # noqa: RUF012  (of SMALL; never written to)


RUNS = (
    Recipe("calm", "nothing goes wrong", (), (TIDIED,), {"calm_share": 1.0}),
    Recipe(
        "replicas_lost",
        "replicas die, leave and complain; their work goes on elsewhere or starts over",
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
        "disk_faults",
        "the coordinator's disk fails and fills up",
        ("disk-error", "disk-full"),
        ("coordinator:diskerror-in-a-turn", "log:taken-over"),
    ),
    Recipe(
        "bad_network",
        "messages are lost, repeated, reordered and spoiled, and links are cut",
        ("partition", "connection-breaks", "loss", "duplicates", "reorder", "bit-flips"),
        ("event:HeartbeatLost",),
    ),
    Recipe(
        "late_pulls",
        "messages get stuck, and a version is gone when a replica comes for it",
        ("swizzle-clog", "partition"),
        ("event:VersionGone",),
    ),
    Recipe(
        "weights_missing",
        "publishes are skipped, and weights arrive corrupt",
        ("publish-skipped", "weights-corrupt", "replica-slow"),
        ("event:PublishSkipped", "event:WeightsRejected"),
        {"max_staleness": 4, "replicas": 4},
    ),
    Recipe(
        "checkpoints",
        "a version that no relay has any more is loaded from its checkpoint, or cannot be",
        ("replica-dies", "weights-corrupt"),
        ("event:CheckpointRefused", "CheckpointRefused -> PullWeights"),
        {"save_freq": 1, "max_staleness": 4, "groups_per_step": 1, "num_train": 20, "every_s": 2.0},
    ),
    Recipe(
        "rewards_fail",
        "siblings are refused, rewards fail, a prompt kills its replicas; rewards of groups",
        ("reward-fails", "sibling-refused", "poison-prompt"),
        ("dropped:quarantined", "dropped:unscored", "event:TrajectoryFailed"),
        {"reward_scope": "group"},
    ),
    Recipe(
        "engine_differs",
        "the trainer leaves out rows, or whole batches, that did not come from their version",
        ("engine-differs",),
        ("dropped:mismatch",),
    ),
    Recipe(
        "hangs",
        "trajectories hang, and batches wait for them",
        ("hangs", "replica-slow"),
        ("dropped:restarted", "TimerFired -> AbortTrajectories"),
        {"batch_wait_ms": 5_000},
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
        "weights arrive damaged at a relay, and are asked for again",
        ("chunk-damaged", "relay-slow"),
        ("event:TransferTrouble",),
    ),
    Recipe(
        "nodes_silent",
        "nodes are silent for longer than their lease while their replicas go on, and die",
        ("node-silent", "replica-dies"),
        ("event:NodeSilent", "event:NodeHeard"),
        {"seconds": 60.0, "num_train": 20},
    ),
    Recipe(
        "event_given_up",
        "coordinators crash on an event, three times on one, which is given up",
        ("event-crashes", "event-poison"),
        ("event:EventGivenUp", "log:taken-over", FAILED),
    ),
    Recipe(
        "evaluation_sampled",
        "three answers to each held-out prompt, some of them lost with their replica",
        ("replica-dies",),
        ("dropped:replica-lost",),
        {"eval_answers": 3, "every_s": 1.0},
    ),
    Recipe(
        "warned",
        "weights are refused by a replica, of which the user is warned",
        ("weights-corrupt",),
        ("event:TrainingWarning", "event:WeightsRejected"),
    ),
    Recipe("drained", "it was asked to stop", ("drain",), ("event:DrainRequested",)),
    Recipe(
        "failed",
        "it loses a process that it cannot do without",
        ("replica-slow",),
        (FAILED,),
        {"fatal_share": 1.0},
    ),
    Recipe(
        "own_strategy",
        "the user's function proposes the batches, sometimes nonsense",
        ("replica-dies",),
        ("event:BatchProposed", "ignored:unusable-proposal"),
        {"batch_strategy": "strategies.py:mine", "num_train": 14},
    ),
    Recipe(
        "on_policy",
        "no staleness at all, and a last batch that is short",
        ("replica-dies",),
        ("event:ProcessExited",),
        {"max_staleness": 0, "drop_last": False, "num_train": 9},
    ),
)


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    make(GOLDEN)
    return 0


def make(folder: Path) -> None:
    """Replace the logs of a folder and their entries in its manifest; entries of others stay."""
    made = [*_present(folder / PRESENT), *_refused(folder / "refused")]
    old = manifest(folder) if (folder / "MANIFEST.json").exists() else []
    parts = {golden.name.split("/")[0] for golden in made}
    made += [golden for golden in old if golden.name.split("/")[0] not in parts]
    made.sort(key=lambda golden: golden.name)
    for golden in made:
        if said := problem(golden, disk_of(folder / golden.name)):
            raise AssertionError(said)
    text = msgspec.json.format(msgspec.json.encode(made)).decode()
    (folder / "MANIFEST.json").write_text(text + "\n")


# --- runs of today ------------------------------------------------------------------------------


def _present(folder: Path) -> list[Golden]:
    shutil.rmtree(folder, ignore_errors=True)
    found = []
    for recipe in RUNS:
        disk = run(recipe)
        _save(folder / recipe.name, {name: disk.read(name) for name in disk.names()})
        found.append(_kept(folder, recipe))
    return found


def run(recipe: Recipe) -> SimDisk:
    """The coordinator's disk after the first run that shows what it is for."""
    for seed in range(1, SEEDS + 1):
        world = World(config(*recipe.faults, **{**SMALL, **recipe.changes}), seed)
        world.run()
        if set(recipe.shows) <= _shown(world):
            print(f"{recipe.name}: seed {seed}, {world.checks.events} events", file=sys.stderr)
            return world.coordinator.disk
    raise AssertionError(f"{recipe.name}: no run of {SEEDS} shows {', '.join(recipe.shows)}")


def _shown(world: World) -> set[str]:
    state, names = world.coordinator.state, world.coordinator.disk.names()
    shown = set(world.coverage.counts)
    shown |= {FAILED} if state is not None and state.failure else set()
    return shown | ({TIDIED} if any(name.endswith(".zst") for name in names) else set())


def _kept(folder: Path, recipe: Recipe) -> Golden:
    facts = follow(disk_of(folder / recipe.name))
    return Golden(name=f"{folder.name}/{recipe.name}", what=recipe.what, facts=facts)


def _save(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


# --- logs that must be refused ------------------------------------------------------------------


def _refused(folder: Path) -> list[Golden]:
    shutil.rmtree(folder, ignore_errors=True)
    records = _records(run(RUNS[0]))
    logs = (
        ("altered_decision", "one decision is another one", "seed=77", _with_other_seed(records)),
        ("unknown_logic", "of other rules", f"logic version {UNKNOWN}", _with_logic(records)),
        ("unknown_schema", "of another form", f"schema {UNKNOWN}", _with_schema(records)),
    )
    for name, _, _, changed in logs:
        _save(folder / name, log_forms.write(changed))
    return [Golden(name=f"refused/{name}", what=w, refusal=r) for name, w, r, _ in logs]


def _records(disk: SimDisk) -> list[Record]:
    return [record for _, record in read_log(disk)]


def _with_other_seed(records: list[Record]) -> Iterable[Record]:
    """Of a trajectory in the middle of the run."""
    left = len(records) // 2
    for record in records:
        left -= 1
        if left < 0 and isinstance(record, DecisionRecord):
            command = codec.decode_command(record.command)
            if isinstance(command, cmd.GenerateTrajectory):
                other = codec.encode(msgspec.structs.replace(command, seed=77))
                record = msgspec.structs.replace(record, command=msgspec.Raw(other))
                left = len(records)
        yield record


def _with_logic(records: list[Record]) -> Iterable[Record]:
    """Without hashes: the logic version is part of the state."""
    for record in records:
        if isinstance(record, StateHashRecord):
            continue
        if isinstance(record, Header):
            record = msgspec.structs.replace(record, logic=UNKNOWN)
        elif isinstance(record, EventRecord):
            event = codec.decode_event(record.event)
            if isinstance(event, ev.CoordinatorStarted):
                other = codec.encode(msgspec.structs.replace(event, logic=UNKNOWN))
                record = msgspec.structs.replace(record, event=msgspec.Raw(other))
        yield record


def _with_schema(records: list[Record]) -> Iterable[Record]:
    for record in records:
        is_header = isinstance(record, Header)
        yield msgspec.structs.replace(record, schema=UNKNOWN) if is_header else record


if __name__ == "__main__":
    sys.exit(main())
