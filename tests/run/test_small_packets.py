"""A machine behind a network of small packets: heartbeats pass, weights and tokens do not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.check.rows import cuts
from tools.kit import real_run
from tools.kit.network import MachinesRun, Network
from tools.kit.real_run import BadRun, check, read_json

SMALL_BITS = 10  #: packets below 1,024 bytes pass: the mask of larger lengths is 0xfc00
FAR = 2  #: the machine behind the narrow network
REPLICAS = {f"rollout-{FAR}.0", f"rollout-{FAR}.1"}


def tc(words: str, *namespace: str) -> None:
    subprocess.run(["tc", *namespace, *words.split()], check=True, capture_output=True)


def narrow(device: str, *namespace: str) -> None:
    """Drop the large packets that this device sends; a queue of one byte takes none."""
    mask = 0xFFFF << SMALL_BITS & 0xFFFF
    for words in (
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb rate 10gbit",
        f"class add dev {device} parent 1: classid 1:2 htb rate 10gbit",
        f"qdisc add dev {device} parent 1:2 bfifo limit 1",
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0 {mask:#x} at 2"
        " flowid 1:1",
        f"filter add dev {device} parent 1: protocol ip prio 2 u32 match u32 0 0 flowid 1:2",
    ):
        tc(words, *namespace)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid():
        pytest.skip("network namespaces need root")
    try:
        with Network(cuts.MACHINES) as network:
            narrow("lo", "-n", network.name(FAR))
            tc("qdisc del dev lo root", "-n", network.name(FAR))
            yield network
    except (OSError, BadRun, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces with packet filters here: {error}")


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_run_continues_without_the_machine_that_gets_no_large_packets(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, so the chain ends before it, and its work continues on the other two."""
    monkeypatch.setattr(real_run, "WAIT_S", 600.0)
    training = MachinesRun(network, tmp_path / "run", *cuts.SETTINGS)
    try:
        training.until(lambda: training.has_processes(cuts.PROCESSES), "all machines take part")
        training.until_step(1)
        narrow(f"in{FAR}", "-n", network.name(FAR))
        narrow(network.outer(FAR))
        training.until_step(training.step() + 11)
        training.drain()
        assert training.end() == 0, training.said()
    finally:
        training.close()
    check(training.run_dir)
    lost_by = read_json(training.run_dir / "summary.json")["lost_by"]
    assert f"relay-{FAR}" in lost_by and any(name.startswith("rollout") for name in lost_by)
    assert {name for name in lost_by if name.startswith("rollout-")} <= REPLICAS
    assert all("established and then stalled" in reason for reason in lost_by.values()), lost_by
    assert all("MTU" in reason for reason in lost_by.values())
    assert "quarantined" not in (training.run_dir / "summary.json").read_text()
