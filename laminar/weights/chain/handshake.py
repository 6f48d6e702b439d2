"""Mutual authentication of two relays: before any transfer, both prove possession of the run's key.

Reads   the key of the run's bulk plane; the identities that both sides sent
Gives   HandshakeTranscript with its proofs; PREDECESSOR and SUCCESSOR, the sides; NONCE_BYTES

Each side sends a fresh nonce. Each proof covers both nonces, both names and incarnations, the run,
the number of the order, and the side of its maker. So a recorded proof cannot be replayed in
another handshake or reflected to its maker. The traffic that follows is neither encrypted nor
signed: an attacker who can alter packets between machines, or files of checkpoints, is not kept
out.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import astuple, dataclass

NONCE_BYTES = 16
PREDECESSOR, SUCCESSOR = "predecessor", "successor"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeTranscript:
    """The facts of a handshake that both sides have to agree on."""

    run: str
    predecessor: str
    predecessor_incarnation: int
    predecessor_nonce: bytes
    successor: str
    successor_incarnation: int
    successor_nonce: bytes
    chain: int

    def compute_proof(self, key: bytes, side: str) -> bytes:
        """Compute this side's proof, an HMAC-SHA-256 of the transcript under the key."""
        fields = (side, *astuple(self))
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in fields]
        told = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(key, told, hashlib.sha256)

    def verify_proof(self, key: bytes, side: str, proof: bytes) -> bool:
        """Return whether `proof` is that side's proof; compares in constant time."""
        return hmac.compare_digest(self.compute_proof(key, side), proof)
