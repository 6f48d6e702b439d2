"""The predecessor of a relay, played by hand: its handshake and the relay's replies.

Reads   messages of a relay to a connection at its bulk address
Gives   hello, greet: as relay-9; received, ended
"""

from __future__ import annotations

import socket
from typing import Any

from laminar.weights.chain import wire
from laminar.weights.chain.handshake import PREDECESSOR, compute_proof

WAIT_S = 20
KEY, NONCE = b"key", bytes(16)


def hello(**changes: Any) -> wire.ChainHello:
    fields = {"run": "run", "name": "relay-9", "incarnation": 1, "chain": 1, "nonce": NONCE}
    return wire.ChainHello(**(fields | changes))


def greet(sock: socket.socket, run: str = "run", key: bytes = KEY) -> bytes:
    """Complete the handshake as predecessor of the relay, and return the bytes sent to it."""
    sock.sendall(said := wire.encode(hello(run=run)))
    challenge = received(sock, wire.successor_decoder)
    proof = compute_proof(key, PREDECESSOR, hello(run=run), challenge)
    sock.sendall(proved := wire.encode(wire.Proof(proof=proof)))
    return said + proved


def received(sock: socket.socket, decoder: Any) -> Any:
    """Receive the next message of the other side."""
    head = sock.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)
    header = wire.unpack_header(head, wire.MESSAGE_BYTES_MAX)
    body = bytearray(sock.recv(header.length, socket.MSG_WAITALL))
    return wire.decode(decoder, header, body)


def ended(sock: socket.socket) -> bytes:
    """Return the bytes that the other side sent before it closed."""
    said = b""
    sock.settimeout(WAIT_S)
    try:
        while data := sock.recv(65536):
            said += data
    except ConnectionResetError:
        pass
    return said
