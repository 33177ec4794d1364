"""The messages of secure aggregation, which `wire` converts to records.

Names of classes and fields are part of the wire format. A field's annotation holds its rule, which
`fields` checks. Fields without a rule are checked elsewhere: public keys by `hpke.load_public_key`,
and arrays by the receiver, which knows their length. Clients check the nonce of a `RoundOffer` with
the rest of the context. Helpers check envelopes and signatures for each client separately.
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
    """Message from leader (server) to helper that begins a run.

    Attributes:
        run_id: the name of the run.
        params: the digest of the settings.
        min_clients: the leader's lower limit on the number of clients in a sum.
    """

    run_id: Name
    params: Name
    min_clients: ClientCount


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    """Message from helper to leader (server) with the key for which clients seal their seeds.

    Attributes:
        run_id: the name of the run, for which alone the key is valid.
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
class RoundOffer(RoundContext):
    """Message from server to client, in the train request, with the parameters of a secure upload.

    The fields that `RoundContext` does not have hold one entry for each helper, as the server
    reports them: its number, its sealing key, its lasting key, and the signature of the sealing
    key. These fields are empty without helpers.
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


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Message from client to leader (server) with the leader's share and a seed for each helper.

    Attributes:
        client: the client's number.
        round_nonce: the random nonce of this attempt at the round.
        model: the digest of the model from which the client started.
        share: the leader's share, ring elements (d,).
        tag: the checksum of `share`.
        envelopes: the sealed (encrypted) seed for each helper.
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
    """Request from leader (server) to helper to open envelopes and, if `release`, to send a sum.

    Without `release` the helper only lists the envelopes that do not open. If there are two or more
    helpers, the leader first sends a request without `release`, because a helper releases the sum
    of only one set of clients. Fields that are not listed here are those of `RoundContext`.

    Attributes:
        asked: all clients that were asked in the round, in ascending order.
        plan: the digest of the public privacy settings of all uploads; "" without privacy.
        length: the number of ring elements of a payload.
        release: whether the helper is to send its sum.
        clients: the clients in the sum, a subset of `asked`.
        envelopes: the sealed seed of each client in the sum.
        identities: the lasting public key of each client in the sum. It is b"" for a client without
            a lasting key, and () if no client has one.
        signatures: the lasting key's signature of each envelope; b"" and () as for `identities`.
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
    """Message from helper to leader (server) with the helper's share of the sum, or with refusals.

    Attributes:
        helper: the number of the helper, ≥ 1.
        round_nonce: the random nonce of this attempt at the round.
        released: whether a sum was released. Otherwise `total` is empty and `tag` is b"".
        rejected: the clients whose envelopes do not open.
        count: the number of clients in `total`.
        clients: the digest of the set of clients in `total`.
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
    """Message by which a party refuses a request; it holds the class name and text of an error."""

    error: str
    message: str


@dataclass(frozen=True, kw_only=True)
class KeysReply:
    """Message from client to server with the client's two public keys for a round."""

    client: ClientNumber
    sealing_key: bytes
    masking_key: bytes


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Message from server to client: who holds the client's secret shares, with the holders' keys.

    Attributes:
        clients: the holders of shares: the client's neighbours, and in a complete graph also the
            client itself.
        points: the evaluation point of each holder in the secret sharing.
        sealing_keys: the public key of each holder for envelopes.
        masking_keys: the public key of each holder for pairwise masks.
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

    The secrets are the seed of the client's self-mask and the client's private masking key.

    Attributes:
        client: the client's number.
        receivers: the neighbours that may open the envelopes.
        envelopes: the sealed shares for each neighbour.
        commitment: a hash of the self-mask seed, against which a recovered seed is checked.
    """

    client: ClientNumber
    receivers: tuple[ClientNumber, ...]
    envelopes: tuple[SealedShares, ...]
    commitment: Commitment


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """Message from server to client with the envelopes that `senders` sealed for this client."""

    senders: tuple[ClientNumber, ...]
    envelopes: tuple[SealedShares, ...]


@dataclass(frozen=True, kw_only=True)
class MaskedReply:
    """Message from client to server with the masked payload and the checksum `tag` of it."""

    client: ClientNumber
    masked: Ring
    tag: Tag


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Request from server to client for shares that unmask the sum.

    Attributes:
        active: the clients in the sum; shares of their self-mask seeds are requested.
        dead: the clients that dropped out; shares of their masking keys are requested.
    """

    active: tuple[ClientNumber, ...]
    dead: tuple[ClientNumber, ...]


@dataclass(frozen=True, kw_only=True)
class UnmaskReply:
    """Message from client to server: shares of active clients' seeds and dropped clients' keys."""

    client: ClientNumber
    active: tuple[ClientNumber, ...]
    seed_shares: tuple[Share, ...]
    dead: tuple[ClientNumber, ...]
    key_shares: tuple[Share, ...]
