"""The messages of secure aggregation, which `wire` converts to records.

Names of classes and fields are part of the wire format. Annotations hold the rules of `fields`.
Some fields have no rule: public keys, which `hpke.load_public_key` checks; arrays, which must have
the length of the receiver's codec; the offer's nonce, which a client compares with the rest of the
context; and envelopes and signatures, which a helper checks client by client.
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
    """Message from leader to helper that begins a run.

    Attributes:
        run_id: the name of the run.
        params: the digest of the settings.
        min_clients: the leader's smallest number of clients in a sum.
    """

    run_id: Name
    params: Name
    min_clients: ClientCount


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    """Message from helper to leader with the key to which clients seal their seeds in a run.

    Attributes:
        run_id: the name of the run.
        helper: the number of the helper, ≥ 1.
        public_key: the helper's public sealing key of the run, 32 bytes.
        identity: the helper's lasting public key; b"" without a lasting key.
        signature: the lasting key's signature of `public_key`; b"" without a lasting key.
    """

    run_id: Name
    helper: HelperNumber
    public_key: bytes
    identity: Identity = b""
    signature: Signature = b""


@dataclass(frozen=True, kw_only=True)
class RoundOffer:
    """Message from leader to client, in the train request, with the parameters of a secure upload.

    The first eight fields are those of `RoundContext`. The other fields have one entry for each
    helper, and are empty without helpers: its number, its sealing key, its lasting key, and the
    signature of the sealing key.
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
        """The helpers' replies to the hello, as the server reports them; it may have altered them.

        Raises:
            ValueError: the fields of helpers differ in length.
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
    """Message from client to leader with the leader's share, and a sealed seed for each helper.

    Attributes:
        client: the client's number.
        round_nonce: the nonce of the attempt at the round.
        model: the digest of the model that the client started from.
        share: the leader's share, ring elements (d,).
        tag: the checksum of `share`.
        envelopes: the sealed seed for each helper.
        identity: the client's lasting public key; b"" without a lasting key.
        signatures: the lasting key's signature of each envelope; () without a lasting key.
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
    """Request from leader to helper to open envelopes and, if `release`, to send a sum of shares.

    Without `release` the helper only lists the envelopes that do not open. With two or more helpers
    that request comes first: a helper that has released one client set's sum releases no other.
    The other fields are those of `RoundContext`.

    Attributes:
        asked: all clients that were asked in the round, in ascending order.
        plan: the digest of the privacy plan of all uploads; "" without privacy.
        length: the number of ring elements of a payload.
        release: whether the helper is to send its sum.
        clients: the clients in the sum, a subset of `asked`.
        envelopes: the sealed seed of each client in the sum.
        identities: the lasting public key of each client in the sum, b"" for a client without; ()
            if no client has a lasting key.
        signatures: the signature of each envelope, b"" or () as for `identities`.
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
    """Message from helper to leader with a share of the sum, or with rejected clients.

    Attributes:
        helper: the number of the helper, ≥ 1.
        round_nonce: the nonce of the attempt at the round.
        released: whether a sum was released; else `total` is empty and `tag` is b"".
        rejected: the clients whose envelopes do not open.
        count: the number of clients in `total`.
        clients: the digest of the client set of `total`.
        total: the helper's share of the sum, ring elements (d,).
        tag: the checksum of `total`.
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
    """A party's refusal, with the class name and text of its error; raising would lose state."""

    error: str
    message: str


@dataclass(frozen=True, kw_only=True)
class KeysReply:
    """Message from client to server with public keys of a round, for envelopes and for masks."""

    client: ClientNumber
    sealing_key: bytes
    masking_key: bytes


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Message from server to client with the holders of the client's shares, and their keys.

    Attributes:
        clients: the holders: the client's neighbours; in a complete graph also the client itself.
        points: the evaluation point of each holder in the secret sharing.
        sealing_keys: the public key for envelopes of each holder.
        masking_keys: the public key for pairwise masks of each holder.
        threshold: the number of shares that recover a secret.
    """

    clients: tuple[ClientNumber, ...]
    points: tuple[Point, ...]
    sealing_keys: tuple[bytes, ...]
    masking_keys: tuple[bytes, ...]
    threshold: ClientCount


@dataclass(frozen=True, kw_only=True)
class SharesReply:
    """Message from client to server with sealed shares of the client's two secrets.

    Attributes:
        client: the client's number.
        receivers: the neighbours that the envelopes are for.
        envelopes: the sealed shares for each neighbour.
        commitment: a hash of the self-mask seed, against which a recovered seed is checked.
    """

    client: ClientNumber
    receivers: tuple[ClientNumber, ...]
    envelopes: tuple[SealedShares, ...]
    commitment: Commitment


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """Message from server to client with the envelopes that neighbours (`senders`) sent to it."""

    senders: tuple[ClientNumber, ...]
    envelopes: tuple[SealedShares, ...]


@dataclass(frozen=True, kw_only=True)
class MaskedReply:
    """Message from client to server with the payload under all masks, and its checksum."""

    client: ClientNumber
    masked: Ring
    tag: Tag


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Request from server to client for shares that unmask the sum.

    Attributes:
        active: the clients in the sum, of whose self-mask seeds shares are requested.
        dead: the clients that dropped out, of whose masking keys shares are requested.
    """

    active: tuple[ClientNumber, ...]
    dead: tuple[ClientNumber, ...]


@dataclass(frozen=True, kw_only=True)
class UnmaskReply:
    """Message from client to server with shares of active clients' seeds and dead clients' keys."""

    client: ClientNumber
    active: tuple[ClientNumber, ...]
    seed_shares: tuple[Share, ...]
    dead: tuple[ClientNumber, ...]
    key_shares: tuple[Share, ...]
