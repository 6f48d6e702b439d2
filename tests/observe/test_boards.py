"""The boards of `trainer.logger`: what they show, and that none of them can hold anything up."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laminar.config import Config, ConfigError, load_config
from laminar.observe import wandb_run
from laminar.observe.board import Board, Scalars
from laminar.observe.boards import Boards
from laminar.observe.metrics import MetricsWriter
from laminar.observe.prometheus import Prometheus
from laminar.observe.status import StatusWriter
from laminar.observe.telemetry import Telemetry
from tests.observe.test_metrics_and_status import TELEMETRY, feed, lines, small_world

ROOT = Path(__file__).parents[2]

WANDB = """
import json, sys
from pathlib import Path
from laminar.config import load_config
from laminar.observe.board import Scalars
from laminar.observe.boards import Boards
from laminar.observe.telemetry import Telemetry

class Log:
    def error(self, event, **fields): print(event, fields)

run_dir, first = Path(sys.argv[1]), int(sys.argv[2])
overrides = ["model.name=m", "data.dataset=d", 'trainer.logger=["wandb"]', "run.name=mine"]
config = load_config([], overrides)
boards = Boards(config, run_dir, Telemetry(), Log())
for step in range(first, first + 3):
    boards.scalars[0].put(Scalars(step, 0.0, {"reward/mean": 1000.5 + step}))
boards.close()
"""


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, event: str, **fields: Any) -> None:
        self.said.append(event)

    info = error


def config(*loggers: str, port: int = 0) -> Config:
    names = json.dumps(list(loggers))
    overrides = [f"trainer.logger={names}", f"coordinator.prometheus_port={port}"]
    return load_config([], ["model.name=m", "data.dataset=d", "run.name=mine", *overrides])


def scraped(address: str) -> dict[str, dict[str, float]]:
    """Values by name and by the value of the only label."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            family.name: {",".join(s.labels.values()): s.value for s in family.samples}
            for family in families
        }


def test_prometheus_reads_the_run(tmp_path: Path) -> None:
    boards = Boards(config("prometheus"), tmp_path, TELEMETRY, Log())
    metrics = MetricsWriter(tmp_path, TELEMETRY, boards.scalars)
    status = StatusWriter(tmp_path, TELEMETRY, boards=boards.status)
    world = small_world()
    feed(metrics, world)
    feed(status, world)
    boards.close()
    (target,) = json.loads((tmp_path / "prometheus.json").read_text())
    assert target["labels"] == {"run": "mine"}
    figures = scraped(target["targets"][0])
    last = [line for line in lines(tmp_path) if "staleness/mean" in line][-1]
    assert figures["laminar_step"] == {"": last["training/global_step"]}
    assert figures["laminar_staleness_mean"] == {"": last["staleness/mean"]}
    assert figures["laminar_ledger_trained_tokens"] == {"": last["ledger/trained_tokens"]}
    assert figures["laminar_phase"] == {"ended": 1}
    shown = json.loads((tmp_path / "status.json").read_text())
    assert sum(figures["laminar_replicas"].values()) == len(shown["replicas"]) > 0
    assert figures["laminar_processes"]["joined"] == len(shown["processes"])


def test_a_scrape_before_the_first_event_is_empty(tmp_path: Path) -> None:
    assert scraped(Prometheus(tmp_path, "mine", "127.0.0.1", 0).address) == {}


def test_a_client_that_disconnects_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = Prometheus(tmp_path, "mine", "127.0.0.1", 0).address
    host, _, port = address.partition(":")
    for sent in (b"", b"GET /metrics HT", b"\x16\x03\x01\xff\r\n\r\n"):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(sent)
            reset = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert scraped(address) == {}
    time.sleep(0.2)  # the threads of those before
    assert capfd.readouterr().err == ""


def test_a_port_that_was_taken_since_the_check_ends_nothing(tmp_path: Path) -> None:
    log = Log()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        boards = Boards(config("prometheus", port=other.getsockname()[1]), tmp_path, TELEMETRY, log)
    assert log.said == ["prometheus-not-served"] and boards.scalars == boards.status == []


def test_nothing_waits_for_a_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Board, "write", lambda board, items: go_on.wait())
    boards = Boards(config("tensorboard"), tmp_path, TELEMETRY, Log())
    feed(MetricsWriter(tmp_path, TELEMETRY, boards.scalars), small_world())
    assert [line["step"] for line in lines(tmp_path) if "staleness/mean" in line][-1] == 6
    go_on.set()


def offline_run(run_dir: Path, first: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WANDB, str(run_dir), str(first)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_wandb_keeps_one_run_over_two_coordinators(tmp_path: Path) -> None:
    """Offline, with the real library: two directories to sync, of one id, with the figures."""
    for first in (1, 4):
        ended = offline_run(tmp_path, first)
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    run_id = (tmp_path / "wandb" / wandb_run.RUN_ID_FILE).read_text()
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(kept) == 2
    for file, steps in zip(kept, ((1, 2, 3), (4, 5, 6)), strict=True):
        written = file.read_bytes()
        assert all(f"{1000 + step}.5".encode() in written for step in steps)


def test_a_wandb_that_cannot_begin_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: wandb_run.WandbRun) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(wandb_run.WandbRun, "_init_run", refuse)
    log, telemetry = Log(), Telemetry()
    boards = Boards(config("wandb"), tmp_path, telemetry, log)
    for step in range(3):
        boards.scalars[0].put(Scalars(step, 0.0, {"reward/mean": 1.0}))
        boards.close()
    assert log.said == ["wandb-not-begun"] and boards.scalars[0].lost_writing == 3


def test_what_wandb_needs_is_asked_for_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", *wandb_run.KEYS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"no API key.*wandb login.*WANDB_MODE=offline"):
        wandb_run.check_wandb()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'k' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    wandb_run.check_wandb()
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_run.check_wandb()
    monkeypatch.setattr(wandb_run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[wandb\]"'):
        wandb_run.check_wandb()
