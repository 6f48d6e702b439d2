"""Three machines with a relay on each: weights go down the chain, and any relay may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.analysis.log import run_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.base import Stamped
from tests.run.conftest import Finished, arenas, check_books, train
from tests.run.test_interruptions import end, start, status, until

pytestmark = pytest.mark.process

MACHINES = 3
RELAYS = [f"relay-{index}" for index in range(MACHINES)]
THREE = [f"run.nodes={MACHINES}", "rollout.replicas=1"]


SMALL_SHM = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=9m t /dev/shm && "$@"', "sh"]
"""Command that runs another one with 9 MB of /dev/shm: room for one arena, not for two."""
EMULATED = (
    "rollout.engine=emulated",
    "emulation.median_response=20",
    "emulation.train_s=0.1",
    "emulation.weights_mb=2",
)


@pytest.fixture(scope="module", params=["emulated", pytest.param("torch", marks=pytest.mark.long)])
def three_machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    run = train(
        tmp_path_factory.mktemp("three"),
        *THREE,
        *(EMULATED if request.param == "emulated" else ()),
        "trainer.total_training_steps=6",
        "trainer.test_freq=3",
        "data.train_batch_size=4",
        "data.val_size=16",
        "data.dataset_size=2000",
    )
    assert run.code == 0, run.output
    return run


def events(run: Finished) -> Iterator[Stamped]:
    for record in run_log.read_records(run.directory):
        if isinstance(record, EventRecord):
            yield run_log.parse_event(record)


def digests(run: Finished) -> dict[int, str]:
    """Of the versions as they were published; a republished one is the same."""
    found: dict[int, str] = {}
    for stamped in events(run):
        if isinstance(stamped.event, ev.WeightsPublished):
            version, digest = stamped.event.version, stamped.event.digest
            assert found.setdefault(version, digest) == digest
    return found


def check_weights(run: Finished, *, killed: bool = False) -> None:
    """What relays received and replicas loaded is what was published, bit for bit.

    A replica loads what the relay of its machine holds (or held until it was killed).
    """
    published = digests(run)
    held: dict[str, tuple[int, ...]] = dict.fromkeys(RELAYS, ())
    loads = dict.fromkeys(RELAYS, 0)
    for stamped in events(run):
        event = stamped.event
        if isinstance(event, ev.RelayReady):
            held[stamped.peer] = ()
        elif isinstance(event, ev.WeightsPublished):
            held[stamped.peer] = event.held
        elif isinstance(event, ev.WeightsReceived):
            assert event.digest == published[event.version], event
            held[stamped.peer] = event.held
        elif isinstance(event, ev.WeightsLoaded):
            assert event.digest == published[event.version], event
            machine = stamped.peer.removeprefix("rollout-").split(".")[0]
            relay = f"relay-{machine}" if "." in stamped.peer else RELAYS[0]
            assert killed or event.version in held[relay], (event, held)
            loads[relay] += event.version in held[relay]
    assert all(loads.values()), loads


def test_every_machine_trains_along_and_the_books_agree(three_machines: Finished) -> None:
    run = three_machines
    assert run.summary["weight_versions"] >= 5
    check_weights(run)
    check_books(run)


def test_relays_get_ever_newer_versions(three_machines: Finished) -> None:
    """The last ones may still be under way when the run ends: it waits for the trainer's relay and
    for the one replica that is evaluated with the export, since nobody generates any more."""
    newest = dict.fromkeys(RELAYS, -1)
    for stamped in events(three_machines):
        if isinstance(stamped.event, ev.WeightsPublished | ev.WeightsReceived):
            assert stamped.event.version > newest[stamped.peer]
            newest[stamped.peer] = stamped.event.version
    assert newest[RELAYS[0]] == max(digests(three_machines))
    assert all(version >= 0 for version in newest.values()), newest


def test_replicas_of_every_machine_generated(three_machines: Finished) -> None:
    generated = {
        stamped.peer
        for stamped in events(three_machines)
        if isinstance(stamped.event, ev.TrajectoryFinished)
    }
    assert generated == {"rollout-0", "rollout-1.0", "rollout-2.0"}


def test_no_shared_memory_is_left(three_machines: Finished) -> None:
    assert arenas(three_machines.directory, MACHINES) == []


@pytest.mark.long
@pytest.mark.parametrize("victims", [("relay-1", "relay-2"), ("relay-0", "relay-1")], ids="-".join)
def test_relays_are_killed(tmp_path: Path, victims: tuple[str, ...]) -> None:
    """The run completes, nobody but the killed gets another pid, every digest is right."""
    process = start(tmp_path, *THREE, f"trainer.total_training_steps={3 * len(victims) + 4}")
    for number, victim in enumerate(victims):
        until(lambda at=1 + 3 * number: status(tmp_path)["step"] >= at, f"step {1 + 3 * number}")
        if not number:
            before = dict(status(tmp_path)["processes"])
        os.kill(status(tmp_path)["processes"][victim], signal.SIGKILL)
    run = end(process, tmp_path)
    assert run.code == 0, run.output
    after = run.summary["processes"]
    assert {name for name in before if after[name] != before[name]} == set(victims)
    check_weights(run, killed=True)
    check_books(run)
    _came_back(run, victims)
    assert arenas(run.directory, MACHINES) == []


def _came_back(run: Finished, victims: tuple[str, ...]) -> None:
    """A killed relay gets versions again; the trainer was never started again."""
    ready = dict.fromkeys(RELAYS, 0)
    has: dict[str, int] = {}
    for stamped in events(run):
        if isinstance(stamped.event, ev.RelayReady):
            ready[stamped.peer] += 1
            has.pop(stamped.peer, None)
        elif isinstance(stamped.event, ev.WeightsPublished | ev.WeightsReceived):
            has[stamped.peer] = stamped.event.version
    assert ready == {name: 1 + (name in victims) for name in RELAYS}
    assert set(has) == set(RELAYS)
    assert has[RELAYS[0]] == max(digests(run))


@pytest.mark.long
def test_a_relay_that_dies_again_and_again_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    """Without the relay of the trainer's machine nobody gets new weights."""
    process = start(tmp_path, *THREE, "trainer.total_training_steps=500", "recovery.max_restarts=0")
    until(lambda: status(tmp_path)["step"] >= 1, "step 1")
    os.kill(status(tmp_path)["processes"]["relay-0"], signal.SIGKILL)
    run = end(process, tmp_path)
    assert run.code == 1, run.output
    assert "relay-0" in run.summary["failure"]
    assert "Traceback" not in run.output
    check_books(run)


@pytest.mark.skipif(
    subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode != 0,
    reason="this user may not mount a file system in another namespace (unshare -m)",
)
@pytest.mark.parametrize("engine", ["emulated", pytest.param("torch", marks=pytest.mark.long)])
def test_a_killed_relay_returns_where_there_is_room_for_one_arena(
    tmp_path: Path, engine: str
) -> None:
    """Trainer and replicas map the dead relay's arena, so only its memory can be had again."""
    settings = ["trainer.total_training_steps=12", *(EMULATED if engine == "emulated" else ())]
    process = start(tmp_path, *settings, within=SMALL_SHM)
    until(lambda: status(tmp_path)["step"] >= 2, "step 2")
    os.kill(status(tmp_path)["processes"]["relay-0"], signal.SIGKILL)
    run = end(process, tmp_path)
    assert run.code == 0, run.output
    assert run.summary["steps"] == 12
    ready = [each for each in events(run) if isinstance(each.event, ev.RelayReady)]
    assert len(ready) == 2
    check_books(run)
