"""The predecessor of a relay, played by hand: its handshake and the relay's replies.

Reads   messages of a relay to a connection at its bulk address
Gives   hello, greet: as relay-9; introduction, received, ended
"""

from __future__ import annotations

import socket
from typing import Any

from laminar.weights.chain import wire
from laminar.weights.chain.handshake import PREDECESSOR, HandshakeTranscript

WAIT_S = 20
KEY, NONCE = b"key", bytes(16)


def hello(**changes: Any) -> bytes:
    fields = {"run": "run", "name": "relay-9", "incarnation": 1, "chain": 1, "nonce": NONCE}
    return wire.encode(wire.ChainHello(**(fields | changes)))


def introduction(challenge: wire.Challenge, run: str = "run") -> HandshakeTranscript:
    """Return the transcript on which relay-9, which sent `hello()`, and the relay must agree."""
    return HandshakeTranscript(
        run=run,
        predecessor="relay-9",
        predecessor_incarnation=1,
        predecessor_nonce=NONCE,
        successor=challenge.name,
        successor_incarnation=challenge.incarnation,
        successor_nonce=challenge.nonce,
        chain=1,
    )


def greet(sock: socket.socket, run: str = "run", key: bytes = KEY) -> bytes:
    """Complete the handshake as predecessor of the relay, and return the bytes sent to it."""
    said = hello(run=run)
    sock.sendall(said)
    told = introduction(received(sock, wire.successor_decoder), run)
    proof = wire.encode(wire.Proof(proof=told.compute_proof(key, PREDECESSOR)))
    sock.sendall(proof)
    return said + proof


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
