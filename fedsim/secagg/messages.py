"""The messages of secure aggregation, and their wire format: records, strictly checked.

Names of classes and fields are part of the wire format. Annotations hold the rules of `fields`.
Some fields have none: public keys, which `hpke.load_public_key` checks; arrays, which must have the
length of the receiver's own codec; the offer's nonce, which a client compares with the rest of the
context; and what one client seals and signs, which a helper judges client by client.

A message becomes `{"kind", "version", field: bool | int | str | bytes | list of one of them}` and
`{field: array}`. Any transport of typed records can carry both.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    SecureAggregationError,
    ShareMismatchError,
    WireError,
    error_by_name,
)
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
                run_id=self.run_id, helper=one, public_key=key, identity=own, signature=signature
            )
            for one, key, own, signature in rows
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


WIRE_VERSION = 3
_MAX_REFUSAL = 2000  # characters of another party's error that are passed on
_Scalar = bool | int | str | bytes
Config = dict[str, _Scalar | list[bool] | list[int] | list[str] | list[bytes]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class WireRecord:
    """A message in the wire format: its plain fields and its arrays."""

    config: Config
    arrays: dict[str, NDArray]


def to_record(message: object) -> WireRecord:
    """Return the record of a dataclass of `messages`, or of a state with fields of such types."""
    config: Config = {"kind": type(message).__name__, "version": WIRE_VERSION}
    arrays: dict[str, NDArray] = {}
    for name, kind in _fields(type(message)).items():
        value = getattr(message, name)
        if kind is np.ndarray:
            arrays[name] = value
        else:
            config[name] = list(value) if isinstance(value, tuple) else value
    return WireRecord(config, arrays)


def from_record(
    kind: type[_T], config: Mapping[str, object], arrays: Mapping[str, NDArray] | None = None
) -> _T:
    """Return the message of a record.

    Args:
        kind: class of the expected message.
        config: plain fields.
        arrays: arrays by field; None: no arrays.

    Raises:
        SecureAggregationError: the record is a refusal; the other party's error is raised.
        WireError: another kind or version, or a field that is missing, unknown or of a wrong type.
    """
    if config.get("kind") == Refusal.__name__ and kind is not Refusal:
        received = from_record(Refusal, config)
        raise error_by_name(received.error, received.message[:_MAX_REFUSAL])
    if config.get("kind") != kind.__name__ or config.get("version") != WIRE_VERSION:
        raise WireError(
            f"expected {kind.__name__} version {WIRE_VERSION}, got {config.get('kind')} version "
            f"{config.get('version')}; run the same fedsim everywhere"
        )
    arrays = arrays or {}
    expected = _fields(kind)
    in_arrays = {name for name, what in expected.items() if what is np.ndarray}
    in_config = {*expected, "kind", "version"} - in_arrays
    extra = [name for name in config if name not in in_config]
    extra += [name for name in arrays if name not in in_arrays]
    if extra:
        raise WireError(f"{kind.__name__} has unknown fields {extra}")
    values: dict[str, Any] = {}
    for name, what in expected.items():
        source = arrays if what is np.ndarray else config
        if name not in source:
            raise WireError(f"{kind.__name__} lacks the field {name!r}")
        values[name] = _check_value(f"{kind.__name__}.{name}", source[name], what)
    return kind(**values)


def to_refusal(error: SecureAggregationError) -> Refusal:
    """Return the message that reports an error to another party."""
    return Refusal(error=type(error).__name__, message=str(error))


def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: _plain(hints[each.name]) for each in fields(kind)}


def _plain(hint: Any) -> Any:
    """Return np.ndarray for every array type, and other types unchanged."""
    branches = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    return np.ndarray if get_origin(branches[0]) is np.ndarray else hint


def _check_value(name: str, value: object, kind: Any) -> object:
    if kind is np.ndarray:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind != "u":
            raise ShareMismatchError(f"{name} must be a one-dimensional array of ring elements")
        return value
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if not isinstance(value, (list, tuple)) or any(type(item) is not inner for item in value):
            raise WireError(f"{name} must be a list of {inner.__name__}")
        return tuple(value)
    if type(value) is not kind:
        raise WireError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value
