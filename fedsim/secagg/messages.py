"""The messages of secure aggregation as plain values; `wire` turns them into records."""

from dataclasses import dataclass, field

import numpy as np

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Leader to helper, once a run: let us aggregate under these parameters."""

    run_id: str
    params: str
    min_clients: int


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    """Helper to leader: the key of this run to which clients seal their seeds.

    `identity` is the helper's lasting key and `signature` its word for `public_key`; both are b""
    where the helper has no lasting key.
    """

    run_id: str
    helper: int
    public_key: bytes
    identity: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True, kw_only=True)
class RoundOffer:
    """Leader to client, with the train request: everything a secure upload needs.

    `helpers` and what is said of them belong together; all are empty where there are no helpers.
    """

    run_id: str
    round_nonce: bytes
    server_round: int
    layout: str
    params: str
    model: str
    helpers: tuple[int, ...]
    helper_keys: tuple[bytes, ...]
    helper_identities: tuple[bytes, ...] = ()
    helper_signatures: tuple[bytes, ...] = ()

    @property
    def hellos(self) -> tuple[HelloReply, ...]:
        """What each helper said of itself, as far as the server tells the truth.

        Raises:
            ValueError: not one key, identity and signature for each helper.
        """
        said = (self.helpers, self.helper_keys, self.helper_identities, self.helper_signatures)
        return tuple(
            HelloReply(
                run_id=self.run_id, helper=one, public_key=key, identity=own, signature=signature
            )
            for one, key, own, signature in zip(*said, strict=True)
        )

    @property
    def context(self) -> RoundContext:
        """What the parties of this round agree on."""
        return RoundContext(
            run_id=self.run_id,
            round_nonce=self.round_nonce,
            server_round=self.server_round,
            layout=self.layout,
            params=self.params,
            model=self.model,
        )


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Client to leader: the leader's share, and a sealed seed for each helper."""

    client: int
    round_nonce: bytes
    model: str
    share: Ring
    tag: bytes
    envelopes: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class CombineRequest:
    """Leader to helper: open these envelopes and, if `release`, send me the sum of the shares.

    Without `release` the helper only says which envelopes it would reject. With two or more helpers
    this comes first, because a helper that has answered for one set answers for no other.
    """

    run_id: str
    round_nonce: bytes
    server_round: int
    layout: str
    model: str
    length: int
    release: bool
    clients: tuple[int, ...]
    envelopes: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class CombineReply:
    """Helper to leader: a share of the sum, or the clients whose envelopes do not open.

    `total` is empty and `tag` is b"" unless a sum was released.
    """

    helper: int
    round_nonce: bytes
    released: bool
    rejected: tuple[int, ...] = ()
    count: int = 0
    clients: str = ""
    total: Ring = field(default_factory=lambda: np.empty(0, np.uint64))
    tag: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Any party to any other: no, and why. Sent, not raised, where raising would lose state."""

    error: str
    message: str


@dataclass(frozen=True, kw_only=True)
class KeysReply:
    """Client to server: public keys of this round, one for envelopes and one for masks."""

    client: int
    sealing_key: bytes
    masking_key: bytes


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Server to client: its holders (neighbours, and itself where it holds too) and their keys.

    `points` are the holders' places in the secret sharing; `threshold` recovers a secret.
    """

    clients: tuple[int, ...]
    points: tuple[int, ...]
    sealing_keys: tuple[bytes, ...]
    masking_keys: tuple[bytes, ...]
    threshold: int


@dataclass(frozen=True, kw_only=True)
class SharesReply:
    """Client to server: for each neighbour, sealed shares of its two secrets.

    `commitment` is a hash of the self-mask seed, by which a wrongly recovered seed is seen.
    """

    client: int
    receivers: tuple[int, ...]
    envelopes: tuple[bytes, ...]
    commitment: bytes


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """Server to client: the envelopes of those neighbours that have sent theirs."""

    senders: tuple[int, ...]
    envelopes: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class MaskedReply:
    """Client to server: the payload under all masks."""

    client: int
    masked: Ring
    tag: bytes


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Server to client: whose masked payload came (self-mask wanted) and whose did not."""

    active: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnmaskReply:
    """Client to server: shares of self-mask seeds of the active, of masking keys of the dead."""

    client: int
    active: tuple[int, ...]
    seed_shares: tuple[bytes, ...]
    dead: tuple[int, ...]
    key_shares: tuple[bytes, ...]
