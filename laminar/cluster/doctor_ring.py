"""Sum over two trainer nodes, run by laminar doctor on both, as ranks make it.

Reads   DIRECTORY/config.toml
Writes  DIRECTORY/ring, where the two ranks meet; sockets between the machines
Gives   measure_ring
Raises  ConfigError if the ranks do not reach each other

Ranks connect at ephemeral ports in both directions, unlike other processes of a run. Imports torch.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from laminar.config import ConfigError
from laminar.net.addresses import interface_of, own_ip
from laminar.run.directory import run_config
from laminar.training.ranks import RankLayout, Rendezvous, device_of, join_rank_group

RING_S = 60.0  #: longest wait for the other rank
RING_BYTES, ROUNDS = 64 << 20, 4


def measure_ring(directory: Path, rank: int) -> float:
    """Return the bytes that each of the two ranks, 0 and 1, sends in a second."""
    config = run_config(directory)
    address = own_ip(config.coordinator.host, "coordinator.host")
    device = device_of(config.trainer.device)
    store = dist.FileStore(str(directory / "ring"), 2)  # type: ignore[attr-defined]
    meeting = Rendezvous(store, interface_of(address))
    try:
        ranks = join_rank_group(meeting, rank, RankLayout(2, 1, "node"), device, RING_S)
        tensor = torch.ones(RING_BYTES // 4, device=device)
        begun = 0.0
        for number in range(ROUNDS + 1):  # the first one connects
            begun = begun if number > 1 else time.monotonic()
            ranks.all_reduce(tensor)
            tensor[0].item()  # waits for the device
        return ROUNDS * RING_BYTES / (time.monotonic() - begun)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"the ranks of two machines do not reach each other from {address} "
            f"({meeting.interface}): {reason:.200}; open the ephemeral ports between trainer "
            "nodes (net.ipv4.ip_local_port_range), or set coordinator.host to the interface of a "
            "network without a firewall"
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
