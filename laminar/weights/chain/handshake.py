"""Mutual authentication of two relays: before any transfer, both prove possession of the run's key.

Reads   the key of the run's bulk plane; the first message of each side, ChainHello and Challenge
Gives   compute_proof, verify_proof; PREDECESSOR and SUCCESSOR, the sides; NONCE_BYTES

Each side sends a fresh nonce. Each proof covers both nonces, both names and incarnations, the run,
the number of the order, and the side of its maker. So a recorded proof cannot be replayed in
another handshake or reflected to its maker. The traffic that follows is neither encrypted nor
signed: an attacker who can alter packets between machines, or files of checkpoints, is not kept
out.
"""

from __future__ import annotations

import hashlib
import hmac

from laminar.weights.chain.wire import ChainHello, Challenge

NONCE_BYTES = 16
PREDECESSOR, SUCCESSOR = "predecessor", "successor"


def compute_proof(key: bytes, side: str, hello: ChainHello, challenge: Challenge) -> bytes:
    """Compute a side's proof: an HMAC-SHA-256 of both messages, without the challenge's proof."""
    caller = (hello.run, hello.name, hello.incarnation, hello.nonce)
    called = (challenge.name, challenge.incarnation, challenge.nonce)
    fields = (side, *caller, *called, hello.chain)
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in fields]
    told = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, told, hashlib.sha256)


def verify_proof(
    key: bytes, side: str, hello: ChainHello, challenge: Challenge, proof: bytes
) -> bool:
    """Return whether `proof` is that side's proof; compares in constant time."""
    return hmac.compare_digest(compute_proof(key, side, hello, challenge), proof)
