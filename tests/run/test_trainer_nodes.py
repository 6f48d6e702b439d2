"""A trainer over two machines in network namespaces: each of its parts is killed or stands still,
and the cable is cut. Training continues from the last checkpoint, on a spare machine if one is
lost; books agree, the weights are those of `laminar retrain`, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from laminar.names.exit_codes import COMPLETE
from tools.kit.network import Network
from tools.kit.real_run import check, read_json

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or (not Path("/usr/sbin/ip").exists() and not Path("/sbin/ip").exists()),
        reason="network namespaces need root and the command `ip`",
    ),
]
LEASE_S = 8
SETTINGS = (
    "trainer.nodes=2",
    "trainer.ranks=2",
    "trainer.total_training_steps=100000",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=20000",
    f"coordinator.node_lease_ms={LEASE_S * 1000}",
    "recovery.max_restarts=99",
    "recovery.restart_window_s=1",
)
POLL_S, WAIT_S = 0.1, 240.0
NODES = (0, 1)  #: machines of the trainer; machine 2 is a spare


class NodesRun:
    """A run whose machines are namespaces: the service, a trainer node and a spare."""

    def __init__(self, network: Network, run_dir: Path, *settings: str) -> None:
        self.network, self.run_dir, self._output = network, run_dir, run_dir.parent / "output"
        place = (f"run.output_dir={run_dir.parent}", f"run.name={run_dir.name}")
        host = f"coordinator.host={network.address(0)}"
        recipe = ("-c", "configs/recipes/words/run.toml")
        words = ("train", "--prepare", *recipe, *SETTINGS, *settings, host, *place)
        assert network.start(0, self._output, *words).wait(WAIT_S) == 0, self.said()
        self.parts = {0: network.start(0, self._output, "serve", str(run_dir))}
        self.start_node(1)

    def start_node(self, machine: int) -> None:
        node = ("--trainer-node", str(machine))
        self.parts[machine] = self.network.start(
            machine, self._output, "serve", str(self.run_dir), *node
        )

    def kill_node(self, machine: int) -> None:
        """End all processes of a machine at once."""
        self.parts.pop(machine)
        for process in self.processes(machine):
            process.kill()

    def processes(self, machine: int, *words: str) -> list[psutil.Process]:
        """Return the processes of a machine, of those words on their command line."""
        name = self.network.name(machine)
        pids = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout.split()
        found = []
        for pid in map(int, pids):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def rank(self, machine: int, index: int) -> psutil.Process:
        """Return a rank that rank 0 or a host has started, by its place there."""
        found = self.processes(machine, "rank_process", str(self.run_dir))
        return sorted(found, key=lambda process: process.pid)[index]

    def actor(self, name: str) -> psutil.Process:
        pids = read_json(self.run_dir / "status.json")["processes"]
        return psutil.Process(int(pids[name]))

    def step(self) -> int:
        return int(read_json(self.run_dir / "status.json").get("step", -1))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.parts[0].poll() is None, self.said()
            assert time.monotonic() < deadline, f"{what}: {self.said()}"
            time.sleep(POLL_S)

    def until_steps(self, count: int, what: str) -> None:
        first = self.step()
        self.until(lambda: self.step() >= first + count, what)

    def end(self) -> None:
        self.parts[0].send_signal(signal.SIGTERM)
        assert self.parts[0].wait(WAIT_S) == COMPLETE, self.said()
        for part in self.parts.values():
            part.wait(WAIT_S)
        left = [p.cmdline() for m in (0, 1, 2) for p in self.processes(m)]
        assert left == [], left

    def close(self) -> None:
        for machine in (0, 1, 2):
            for process in self.processes(machine):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def said(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


def _signal(find: Callable[[NodesRun], psutil.Process], number: int) -> Callable[[NodesRun], None]:
    return lambda run: find(run).send_signal(number)


def _cut(seconds: float, change: str = "cut") -> Callable[[NodesRun], None]:
    def cut(run: NodesRun) -> None:
        getattr(run.network, change)(1, cut=True)
        time.sleep(seconds)
        getattr(run.network, change)(1, cut=False)

    return cut


PARTS: dict[str, Callable[[NodesRun], psutil.Process]] = {
    "rank 0": lambda run: run.actor("trainer-0"),
    "rank 1, of the first machine": lambda run: run.rank(0, 0),
    "rank 3, of the second": lambda run: run.rank(1, 1),
    "the rank host": lambda run: run.actor("ranks-1"),
}
FAULTS = {
    **{f"kill {name}": _signal(find, signal.SIGKILL) for name, find in PARTS.items()},
    **{f"stop {name}": _signal(find, signal.SIGSTOP) for name, find in PARTS.items()},
    "cut for 3 s": _cut(3.0),
    "cut for 30 s": _cut(30.0),
    "one way for 30 s": _cut(30.0, "mute"),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", ["node", "all"])
def test_training_continues_after_each_fault(network: Network, tmp_path: Path, shard: str) -> None:
    run = NodesRun(network, tmp_path / "run", f"trainer.shard={shard}")
    try:
        run.until_steps(2, "the first steps")
        for name, strike in FAULTS.items():
            run.until_steps(1, f"a step before {name}")
            begun_s, step = time.monotonic(), run.step()
            strike(run)
            run.until(lambda: run.step() > step + 1, f"two steps after {name}")  # noqa: B023
            print(f"{shard}, {name}: next step but one after {time.monotonic() - begun_s:.1f} s")
        run.end()
        check(run.run_dir)
    finally:
        run.close()


@pytest.mark.timeout(900)
def test_a_spare_takes_the_place_of_a_lost_machine(network: Network, tmp_path: Path) -> None:
    run = NodesRun(network, tmp_path / "run")
    try:
        run.until_steps(2, "the first steps")
        run.start_node(2)
        run.until(lambda: bool(run.processes(2, "actor")), "the spare is there")
        begun_s = time.monotonic()
        run.kill_node(1)
        run.until_steps(2, "two steps on the spare")
        print(f"a lost machine: next step but one after {time.monotonic() - begun_s:.1f} s")
        assert len(run.processes(2, "rank_process")) == 2
        run.end()
        check(run.run_dir)
    finally:
        run.close()
