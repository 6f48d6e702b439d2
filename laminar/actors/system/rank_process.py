"""A rank of the trainer, other than the first, started by run/child_process.py.

Reads   RUN/config.toml; orders of rank 0
Writes  files as ordered; logs/latest/LOG.rank-N.jsonl of the run, if it has a log
Gives   build_rank_command, the module and words that start one; main

Only rank 0 takes part in the run; it starts the other ranks, which end with it even while they
compute. They are not forked from a warm process, since `laminar retrain` has none.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from laminar.names import exit_codes
from laminar.net.addresses import LOCALHOST, interface_of
from laminar.observe.logs import configure_logging, get_logger
from laminar.observe.telemetry import DRAIN_S
from laminar.run.child_process import connect_parent
from laminar.run.directory import run_config
from laminar.run.fail_points import FailPoints
from laminar.training.rank_processes import RankLink

OF_RANK_0 = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or batch system sends to all processes; rank 0 handles them."""


def build_rank_command(run_dir: Path, log: str = "", address: str = LOCALHOST) -> list[str]:
    """Return the module of a rank and its words, for RankProcesses.

    `log`: the name of its log, without its number; empty: none. `address`: of this machine, on the
    network of the ranks.
    """
    return ["laminar.actors.system.rank_process", str(run_dir), log, interface_of(address)]


def main(fd: str, parent: str, run_dir: str, log: str, network: str, rank: str) -> NoReturn:
    end = connect_parent(fd, parent)  # before the imports, which take seconds
    from laminar.actors.system.learners import worker_of

    for number in OF_RANK_0:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    directory = Path(run_dir)
    config = run_config(directory)
    telemetry = configure_logging(directory, config.run.name, f"{log}.rank-{rank}") if log else None
    if telemetry is not None:
        get_logger().info("rank", pid=os.getpid())
    points = FailPoints(directory if log else None)
    link = RankLink(end, config.coordinator.node_lease_ms / 1000)
    worker = worker_of(config, int(rank), link.submit, network, points.hit_failpoint)

    async def handle(order: bytes) -> bytes:
        try:
            return await worker.handle_order(order)
        except Exception:
            if telemetry is not None:
                get_logger().exception("order-failed")
            raise

    asyncio.new_event_loop().run_until_complete(link.serve_orders(handle))
    if telemetry is not None:
        telemetry.wait_drained(DRAIN_S)
    os._exit(exit_codes.COMPLETE)  # a thread may be in a collective that the other ranks never join


if __name__ == "__main__":
    main(*sys.argv[1:])
