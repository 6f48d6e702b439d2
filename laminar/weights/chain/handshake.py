"""What two relays prove to each other before any weight passes: that both have the run's key.

Reads   the key of the run's bulk plane; what both have said of themselves
Gives   Introduction, its proofs; PREDECESSOR and SUCCESSOR, the sides; NONCE_BYTES

Each side sends a nonce that was never used before, and the proof of each covers both nonces, both
names and incarnations, the run, the number of the order, and which of the two sides it is. So a
proof that was overheard is of no use in another greeting, nor is one that is sent back to its
maker. What follows is neither encrypted nor signed: who can alter what passes between two machines
is not kept out, as on the file system that the checkpoints are on.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import astuple, dataclass

NONCE_BYTES = 16
PREDECESSOR, SUCCESSOR = "predecessor", "successor"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeTranscript:
    """What both sides of a greeting have to agree on."""

    run: str
    predecessor: str
    predecessor_incarnation: int
    predecessor_nonce: bytes
    successor: str
    successor_incarnation: int
    successor_nonce: bytes
    chain: int

    def compute_proof(self, key: bytes, side: str) -> bytes:
        """What only a relay with the key can say as this side."""
        fields = (side, *astuple(self))
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in fields]
        told = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(key, told, hashlib.sha256)

    def verify_proof(self, key: bytes, side: str, proof: bytes) -> bool:
        """Whether this is the proof of that side; takes as long for any wrong one."""
        return hmac.compare_digest(self.compute_proof(key, side), proof)
