"""Two machines that look at each other, played by two threads: what each fault is called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from laminar.cluster import doctor_ring, doctor_two_nodes
from laminar.cluster.doctor_two_nodes import (
    Found,
    MachineFacts,
    check_this_machine,
    format_results,
    parse_results,
)
from laminar.config import ConfigError, dump_config, load_config
from laminar.run.directory import CONFIG_FILE
from laminar.training.ranks import INTERFACE_VARIABLES


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = load_config([], ["model.name=m", "data.dataset=gcd"])
    (tmp_path / CONFIG_FILE).write_text(dump_config(config))
    return tmp_path


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setattr(doctor_two_nodes, name, value)

    set_(SEEN_S=5.0, CONNECT_S=5.0)
    return set_


def both(directory: Path) -> list[Found]:
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(check_this_machine, directory, rank) for rank in (0, 1)]
        return [found for task in tasks for found in task.result(60)]


def faults(found: list[Found]) -> list[tuple[str, str]]:
    return [(each.subject.split()[1], each.text) for each in found if not each.sound]


def test_two_sound_machines(directory: Path) -> None:
    found = both(directory)
    assert faults(found) == []
    subjects = [each.subject.split()[1] for each in found]
    shared = ["directory", "program", "address"]
    assert subjects == [*shared, *shared, "clock", "renames", "locks"]


def test_a_lock_that_the_other_machine_does_not_see(
    directory: Path, patch: Callable[..., None]
) -> None:
    patch(try_lock=lambda fd, kind: True)
    ((subject, text),) = faults(both(directory))
    assert subject == "locks" and "could resume one run at a time" in text and "nolock" in text


def test_a_file_that_is_replaced_and_seen_too_late(
    directory: Path, patch: Callable[..., None]
) -> None:
    write = doctor_two_nodes.write_whole

    def late(path: Path, data: bytes, *, durable: bool) -> None:
        if data != b"new":
            write(path, data, durable=durable)

    patch(SEEN_S=1.0, write_whole=late)
    ((subject, text),) = faults(both(directory))
    assert subject == "renames" and "within 1 s" in text and "actimeo" in text


def test_a_clock_that_is_wrong(directory: Path, patch: Callable[..., None]) -> None:
    patch(CLOCK_S=-1.0)
    ((subject, text),) = faults(both(directory))
    assert subject == "clock" and "NTP" in text


def test_a_port_that_is_not_reached(directory: Path, patch: Callable[..., None]) -> None:
    def refused(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    patch(CONNECT_S=0.5)
    monkey = doctor_two_nodes.socket.create_connection
    try:
        doctor_two_nodes.socket.create_connection = refused  # type: ignore[assignment]
        found = faults(both(directory))
    finally:
        doctor_two_nodes.socket.create_connection = monkey
    assert {subject for subject, _ in found} == {"address"}
    assert all("firewall" in text for _, text in found)


def test_a_directory_that_the_other_machine_does_not_see(
    directory: Path, patch: Callable[..., None]
) -> None:
    patch(SEEN_S=0.3)
    ((subject, text),) = faults(check_this_machine(directory, 0))
    assert subject == "directory" and "all machines share" in text
    ((subject, text),) = faults(check_this_machine(directory / "none", 1))
    assert subject == "directory" and "does not see" in text


def test_another_version_and_a_name_that_only_its_machine_reaches() -> None:
    own, other = (
        MachineFacts("a", "1", "x", "10.0.0.1", 1, "2.13.0"),
        MachineFacts("b", "2", "y", "127.0.1.1", 1, "2.12.0"),
    )
    found = doctor_two_nodes.run_check(
        "a program", lambda: doctor_two_nodes._check_version(own, other)
    )
    assert not found.sound and "1 here and 2 on b" in found.text
    same = msgspec.structs.replace(other, version="1")
    with pytest.raises(ConfigError, match=r"torch is 2\.13\.0 here and 2\.12\.0 on b"):
        doctor_two_nodes._check_version(own, same)
    with doctor_two_nodes.socket.create_server(("127.0.0.1", 0)) as listening:
        link = doctor_two_nodes._PeerLink(listening, own, other)
        found = doctor_two_nodes.run_check("a address", lambda: link.open(first=True))
    assert not found.sound and "coordinator.host" in found.text


def test_ranks_of_two_machines_meet_and_the_shard_is_recommended(tmp_path: Path) -> None:
    config = load_config(["configs/recipes/words/run.toml"], ["trainer.nodes=2"])
    (tmp_path / CONFIG_FILE).write_text(dump_config(config))
    words = [sys.executable, "-m", "laminar.cli.main", "doctor", "--pair", str(tmp_path)]
    places = [{**os.environ, "SLURM_PROCID": rank} for rank in "01"]
    tasks = [subprocess.Popen(words, env=place, stdout=subprocess.PIPE) for place in places]
    for output in [task.communicate(timeout=300)[0] for task in tasks]:
        (found,) = parse_results(output.decode())
        assert faults(found) == []
        (ranks,) = (each.text for each in found if each.subject.endswith(" ranks"))
        assert "GB/s between two ranks; trainer.shard = 'node', so that each update" in ranks


def test_a_rank_that_the_other_does_not_reach(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "lo")
    monkeypatch.setattr(doctor_ring, "RING_S", 0.2)
    with pytest.raises(ConfigError, match=r"do not reach each other from 127\.0\.0\.1 .*ephemeral"):
        doctor_ring.measure_ring(directory, 0)


def test_what_two_tasks_say_at_once_is_told_apart() -> None:
    """srun cuts lines of more than 1,024 bytes, and puts those of another task between."""
    long = Found("n1 memory", True, "gr\u00f6\u00dfer " * 400)
    both = [[long, Found("n1 data", False, "no\nrow")], [long]]
    first, second = ([*format_results(rank, found)] for rank, found in enumerate(both))
    assert max(len(line.encode()) for line in first + second) < 1024
    mixed = [line for pair in zip(first, second, strict=False) for line in reversed(pair)]
    rest = first[len(second) :] + second[len(first) :]
    assert parse_results("\n".join(["a module says [0]", *mixed, *rest])) == both
    assert parse_results("\n".join([*first, second[0]])) == both[:1]
