"""Requests of a user to a running coordinator, from any machine that sees the run directory.

Reads   RUN/coordinator.json, RUN/secret
Emits   one event of the user to the coordinator, until that has it on disk
Gives   send_user_event; is_coordinator_alive
Raises  ConfigError with one sentence: the coordinator does not respond, or refuses connections

Separate from net/client.py, whose clients are processes of the run with a name and a place in its
books; a user's request has neither.
"""

from __future__ import annotations

import time
from pathlib import Path

from laminar.config import ConfigError
from laminar.events.base import Event
from laminar.events.codec import encode
from laminar.net.auth import RunKeys
from laminar.net.client import accepts_connections, read_address
from laminar.net.frames import FRAME_BYTES_MAX, Ack, Ask, Heartbeat, decode_server
from laminar.net.frames import encode as encode_frame
from laminar.net.transport import ClientSocket
from laminar.run.directory import COORDINATOR_FILE
from laminar.run.secret import read_secret

ANSWER_S = 20.0  #: timeout of a request, long enough for a coordinator to restart, even elsewhere
AGAIN_S = 1.0
TURN_S = 5.0  #: time limit for a turn of a living coordinator
_POLL_S = 0.02


def send_user_event(run_dir: Path, event: Event) -> None:
    """Send an event of the user; return once the coordinator has logged it."""
    socket = ClientSocket(RunKeys(read_secret(run_dir)))
    frame = encode_frame(Ask(encode(event)))
    begun, again_s = time.monotonic(), 0.0
    try:
        while (now := time.monotonic()) - begun < ANSWER_S:
            if now >= again_s:
                again_s = now + AGAIN_S
                _look_up(socket, run_dir)
                if socket.address:
                    socket.send(frame)
            if any(
                isinstance(decode_server(f, FRAME_BYTES_MAX), Ack) for f in socket.drain_frames()
            ):
                return
            if reason := socket.find_refusal_reason():
                raise ConfigError(reason)
            time.sleep(_POLL_S)
    finally:
        socket.close()
    if not socket.address:
        raise ConfigError(f"{run_dir / COORDINATOR_FILE}, the coordinator's address, is missing")
    raise ConfigError(f"the coordinator at {socket.address} did not answer for {ANSWER_S:g} s")


def is_coordinator_alive(address: str, keys: RunKeys) -> bool:
    """Return whether a coordinator of the run responds at this address; blocks, needs no loop."""
    if not accepts_connections(address):
        return False
    asking = ClientSocket(keys)
    try:
        asking.connect(address)
        asking.send(encode_frame(Heartbeat("", 0)))
        deadline = time.monotonic() + TURN_S
        while not (heard := asking.drain_frames()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return bool(heard)
    finally:
        asking.close()


def _look_up(socket: ClientSocket, run_dir: Path) -> None:
    """Connect to the coordinator's current address, which a restart may have changed."""
    address = read_address(run_dir / COORDINATOR_FILE)
    if address and address != socket.address:
        socket.connect(address)
