"""The context of a round, which makes encrypted secrets and masks useless in any other round."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

NONCE_BYTES = 16
_DOMAIN = b"fedsim secure aggregation 2"


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """The values of a secure aggregation round on which the server, helpers and clients must agree.

    Attributes:
        run_id: the name of the run.
        round_nonce: 16 random bytes, new for every attempt at a round.
        server_round: the round, ≥ 1.
        layout: the digest of the model's tensor names, shapes and types.
        params: the digest of the secure aggregation settings.
        model: the digest of the model at the start of the round.
        asked: the digest of the set of all clients that the server asked (`set_digest`).
        plan: the digest of the public privacy settings; "" without privacy.
    """

    run_id: str
    round_nonce: bytes
    server_round: int
    layout: str
    params: str
    model: str
    asked: str
    plan: str

    def values(self) -> dict[str, Any]:
        """Return the values of the context by name, without those that a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(RoundContext)}

    def info(self, *, purpose: str, sender: int, receiver: int) -> bytes:
        """Return the `info` bytes (HPKE, HKDF) that bind one secret to this round and its parties.

        Guarantee: different fields give different bytes (every field is preceded by its length).

        Args:
            purpose: the use of the secret, as a text that is part of the wire format.
            sender: the number of the client or helper that sends the secret.
            receiver: the number of the party that receives it; 0 for the server.
        """
        parts = (purpose, *self.values().values(), sender, receiver)
        encoded = (part if isinstance(part, bytes) else str(part).encode() for part in parts)
        return pack([_DOMAIN, *encoded])


def pack(fields: Iterable[bytes]) -> bytes:
    """Return byte fields joined, each after its length; different lists give different bytes."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def set_digest(clients: Iterable[int]) -> str:
    """Return the SHA-256, in hex, of a set of client numbers; the order does not matter."""
    return hashlib.sha256(pack(str(client).encode() for client in sorted(clients))).hexdigest()
