"""The run's figures for Prometheus, at http://127.0.0.1:PORT/metrics of the coordinator.

Reads   each status (observe/status.py) and the figures of each step, through outlets
Serves  the latest of both, by a thread of the prometheus_client library
Writes  RUN/prometheus.json: the address, for Prometheus' file_sd_configs

Names are those of metrics.jsonl with the prefix `laminar_` and `_` for unsupported characters. A
request returns the latest values without involving the coordinator's loop.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from laminar.observe.board import Scalars
from laminar.run.renames import write_whole

TARGET_FILE = "prometheus.json"
NO_NAME = re.compile(r"\W+")
#: numbers of status.json: key and meaning
STATUS_FIGURES = {
    "event": "number of the last event",
    "step": "completed training steps",
    "total_steps": "planned training steps; 0: unknown",
    "tokens_per_s": "sampled tokens per second, all replicas",
    "staleness_mean": "staleness in steps over all training so far",
    "staleness_max": "staleness in steps over all training so far",
    "newest_version": "newest published weight version",
    "groups_ready": "finished groups that no batch has taken",
    "reward": "mean reward of the last step",
}
#: sums over the last gauges of all replicas
ENGINE_FIGURES = ("kv_used_tokens", "kv_capacity_tokens", "running", "waiting", "preempted")


class Prometheus(Collector):
    """The latest status and the figures of the latest step, as a scrape returns them."""

    def __init__(self, run_dir: Path, run_name: str, host: str, port: int) -> None:
        """Listen; port 0 picks any free port. Raises OSError if the port is taken."""
        self._status: dict[str, Any] = {}
        self._step: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        server, _ = start_http_server(port, host, registry)
        server.handle_error = _ignore_client  # type: ignore[method-assign, assignment]
        self.address = f"{host}:{server.server_port}"
        target = {"targets": [self.address], "labels": {"run": run_name}}
        self._target = (run_dir / TARGET_FILE, msgspec.json.encode([target]))

    def show_status(self, found: list[dict[str, Any]]) -> None:
        """Show the newest status; called by its outlet."""
        if not self._status:
            write_whole(*self._target, durable=False)
        self._status = found[-1]

    def show_step(self, items: list[Scalars]) -> None:
        """Show figures; called by their outlet. Figures of evaluations and of steps are merged."""
        for item in items:
            self._step = self._step | item.figures

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return all gauges; the library calls it for each request, and once at registration."""
        status, step = self._status, self._step
        if not status:
            return
        for key, meaning in STATUS_FIGURES.items():
            if status[key] is not None:
                yield _make_gauge(key, meaning, status[key])
        yield _by_label(
            "phase", "current phase of the run, with value 1", "phase", {status["phase"]: 1}
        )
        yield from _make_replica_gauges(status["replicas"])
        alive, silent = len(status["processes"]), len(status["silent_nodes"])
        processes = {"joined": alive, "silent": silent}
        yield _by_label(
            "processes", "processes of the run; silent: node daemons", "state", processes
        )
        for name, value in step.items():
            yield _make_gauge(
                name, f"{name} of the last step or evaluation, see docs/metrics.md", value
            )


def _ignore_client(request: Any, address: Any) -> None:
    """Print no traceback about a client that disconnects; replaces the server's method."""


def _make_replica_gauges(replicas: dict[str, dict[str, Any]]) -> Iterator[GaugeMetricFamily]:
    doing = Counter(replica["doing"] for replica in replicas.values())
    yield _by_label("replicas", "replicas by activity", "doing", dict(doing))
    versions = [replica["version"] for replica in replicas.values()]
    if versions:
        meaning = "weight version served by a replica; -1: none"
        ends = {"oldest": min(versions), "newest": max(versions)}
        yield _by_label("replica_version", meaning, "end", ends)
    gauges = [replica["engine"] for replica in replicas.values() if replica["engine"]]
    for key in ENGINE_FIGURES:
        total = sum(gauge[key] for gauge in gauges)
        yield _make_gauge(f"engine_{key}", "sum of the replicas' latest gauges", total)


def _make_gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"laminar_{NO_NAME.sub('_', name)}", meaning, value)


def _by_label(name: str, meaning: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"laminar_{name}", meaning, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
