"""The messages of secure aggregation; `wire` turns them into records.

Names of classes and fields are part of the wire format. Annotations hold the rules of `fields`.
Some fields have none: public keys, which `hpke.load_public_key` checks; arrays, which must have the
length of the receiver's own codec; the offer's nonce, which a client compares with the rest of the
context; and what one client seals and signs, which a helper judges client by client.
"""

from dataclasses import dataclass, field

import numpy as np

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.fields import (
    ClientCount,
    ClientNumber,
    Commitment,
    HelperNumber,
    Identity,
    Name,
    Nonce,
    Point,
    RoundNumber,
    SealedSeed,
    SealedShares,
    Share,
    Signature,
    Tag,
    TagOrNone,
    VectorLength,
)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Leader to helper, once a run: start of the run, with its parameters."""

    run_id: Name
    params: Name
    min_clients: ClientCount


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    """Helper to leader: the key of this run to which clients seal their seeds.

    `identity` is the helper's lasting public key and `signature` its signature of `public_key`;
    both are b"" if the helper has no lasting key.
    """

    run_id: Name
    helper: HelperNumber
    public_key: bytes
    identity: Identity = b""
    signature: Signature = b""


@dataclass(frozen=True, kw_only=True)
class RoundOffer:
    """Leader to client, with the train request: everything that a secure upload needs.

    The four fields `helper...` have one entry for each helper; all are empty without helpers.
    `asked` and `plan` are those of `RoundContext`.
    """

    run_id: Name
    round_nonce: bytes
    server_round: RoundNumber
    layout: Name
    params: Name
    model: Name
    asked: Name
    plan: Name
    helpers: tuple[HelperNumber, ...]
    helper_keys: tuple[bytes, ...]
    helper_identities: tuple[Identity, ...] = ()
    helper_signatures: tuple[Signature, ...] = ()

    @property
    def hellos(self) -> tuple[HelloReply, ...]:
        """The helpers' replies as the server reports them; a dishonest server can alter them.

        Raises:
            ValueError: not one key, identity and signature for each helper.
        """
        rows = zip(
            self.helpers,
            self.helper_keys,
            self.helper_identities,
            self.helper_signatures,
            strict=True,
        )
        return tuple(
            HelloReply(
                run_id=self.run_id,
                helper=helper,
                public_key=key,
                identity=identity,
                signature=signature,
            )
            for helper, key, identity, signature in rows
        )

    @property
    def context(self) -> RoundContext:
        """The context of this round."""
        return RoundContext(
            run_id=self.run_id,
            round_nonce=self.round_nonce,
            server_round=self.server_round,
            layout=self.layout,
            params=self.params,
            model=self.model,
            asked=self.asked,
            plan=self.plan,
        )


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Client to leader: the leader's share, and a sealed seed for each helper.

    `identity` is the client's lasting public key, and `signatures` has its signature of each
    envelope; b"" and () if the client has no lasting key.
    """

    client: ClientNumber
    round_nonce: Nonce
    model: Name
    share: Ring
    tag: Tag
    envelopes: tuple[SealedSeed, ...]
    identity: Identity = b""
    signatures: tuple[Signature, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CombineRequest:
    """Leader to helper: request to open envelopes and, if `release`, to send the sum of shares.

    Without `release` the helper only lists the envelopes that do not open. With two or more helpers
    this request comes first: a helper that has released one client set's sum releases no other.

    Attributes:
        asked: all clients that were asked in the round, in ascending order.
        plan: digest of the privacy plan of all uploads; "" without privacy.
        clients: clients of the sum, a part of `asked`.
        envelopes: the sealed seed of each client of the sum.
        identities: lasting public key of each client of the sum, b"" for one without; () if none
            has one.
        signatures: signature of each envelope, likewise.
    """

    run_id: Name
    round_nonce: Nonce
    server_round: RoundNumber
    layout: Name
    model: Name
    asked: tuple[ClientNumber, ...]
    plan: Name
    length: VectorLength
    release: bool
    clients: tuple[ClientNumber, ...]
    envelopes: tuple[bytes, ...]
    identities: tuple[bytes, ...] = ()
    signatures: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CombineReply:
    """Helper to leader: a share of the sum, or the clients whose envelopes do not open.

    Attributes:
        released: whether a sum was released; else `total` is empty and `tag` is b"".
        rejected: clients whose envelopes do not open.
        count: number of clients in `total`.
        clients: digest of the client set of `total`.
        total: the helper's share of the sum, ring elements (d,).
        tag: checksum of `total`.
    """

    helper: HelperNumber
    round_nonce: Nonce
    released: bool
    rejected: tuple[ClientNumber, ...] = ()
    count: ClientCount = 0
    clients: Name = ""
    total: Ring = field(default_factory=lambda: np.empty(0, np.uint64))
    tag: TagOrNone = b""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Any party to any other: a refusal with its error; sent where raising would lose state."""

    error: str
    message: str


@dataclass(frozen=True, kw_only=True)
class KeysReply:
    """Client to server: public keys of this round, one for envelopes and one for masks."""

    client: ClientNumber
    sealing_key: bytes
    masking_key: bytes


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Server to client: the holders of its shares and their keys.

    Attributes:
        clients: the client's neighbours; in a complete graph also the client itself.
        points: evaluation points of the holders in the secret sharing.
        sealing_keys: public keys for envelopes, one for each holder.
        masking_keys: public keys for pairwise masks, one for each holder.
        threshold: number of shares that recover a secret.
    """

    clients: tuple[ClientNumber, ...]
    points: tuple[Point, ...]
    sealing_keys: tuple[bytes, ...]
    masking_keys: tuple[bytes, ...]
    threshold: ClientCount


@dataclass(frozen=True, kw_only=True)
class SharesReply:
    """Client to server: for each neighbour, sealed shares of its two secrets.

    `commitment` is a hash of the self-mask seed; it reveals a wrongly recovered seed.
    """

    client: ClientNumber
    receivers: tuple[ClientNumber, ...]
    envelopes: tuple[SealedShares, ...]
    commitment: Commitment


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """Server to client: the envelopes of the neighbours that sent theirs."""

    senders: tuple[ClientNumber, ...]
    envelopes: tuple[SealedShares, ...]


@dataclass(frozen=True, kw_only=True)
class MaskedReply:
    """Client to server: the payload under all masks."""

    client: ClientNumber
    masked: Ring
    tag: Tag


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Server to client: request for shares that unmask the sum.

    Attributes:
        active: clients in the sum; the shares of their self-mask seeds are requested.
        dead: clients that dropped out; the shares of their masking keys are requested.
    """

    active: tuple[ClientNumber, ...]
    dead: tuple[ClientNumber, ...]


@dataclass(frozen=True, kw_only=True)
class UnmaskReply:
    """Client to server: shares of the active clients' seeds and of the dead clients' keys."""

    client: ClientNumber
    active: tuple[ClientNumber, ...]
    seed_shares: tuple[Share, ...]
    dead: tuple[ClientNumber, ...]
    key_shares: tuple[Share, ...]
