"""What a share belongs to: bound into every envelope and every mask, so that none can be moved."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

NONCE_BYTES = 16
_DOMAIN = b"fedsim secure aggregation 1"


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """What all parties of one round must agree on.

    Attributes:
        run_id: the run.
        round_nonce: 16 random bytes, new for every attempt at a round.
        server_round: the round, ≥ 1.
        layout: digest of the tensor layout.
        params: digest of the settings.
        model: digest of the model that the clients started from.
    """

    run_id: str
    round_nonce: bytes
    server_round: int
    layout: str
    params: str
    model: str

    def info(self, *, purpose: str, sender: int, receiver: int) -> bytes:
        """Return the bytes that name one secret: this round, what it is for, from whom, to whom.

        Guarantee: different fields give different bytes (every field is preceded by its length).
        """
        return pack(
            [
                _DOMAIN,
                purpose.encode(),
                self.run_id.encode(),
                self.round_nonce,
                str(self.server_round).encode(),
                self.layout.encode(),
                self.params.encode(),
                self.model.encode(),
                str(sender).encode(),
                str(receiver).encode(),
            ]
        )

    def with_nonce(self, nonce: bytes) -> "RoundContext":
        """Return the context of another attempt at the same round."""
        return replace(self, round_nonce=nonce)


def pack(fields: Iterable[bytes]) -> bytes:
    """Return the fields as one string, each preceded by its length: injective."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def set_digest(clients: Iterable[int]) -> str:
    """Return the SHA-256 of a set of clients, whatever their order."""
    return hashlib.sha256(pack(str(client).encode() for client in sorted(clients))).hexdigest()
