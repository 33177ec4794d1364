"""Client side of secure aggregation by pairwise masks (SecAgg, SecAgg+), in four stages."""

from dataclasses import dataclass, field, replace

import numpy as np

from fedsim.core.limits import MAX_CLIENTS
from fedsim.secagg.context import RoundContext
from fedsim.secagg.digests import vector_tag
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    ContextMismatchError,
    ProtocolOrderError,
    PublicKeyError,
    ThresholdError,
    TooFewClientsError,
    UnmaskRefusedError,
    WireError,
)
from fedsim.secagg.fields import check_fields
from fedsim.secagg.graph import complete_threshold
from fedsim.secagg.hpke import SealingKey, check_distinct, load_public_key, seal
from fedsim.secagg.masks import (
    PairwiseMasks,
    SeedExpander,
    commitment,
    masked_info,
    new_seed,
    secret_share_info,
)
from fedsim.secagg.messages import (
    KeysReply,
    MaskedReply,
    MaskRequest,
    Roster,
    RoundOffer,
    SharesReply,
    UnmaskReply,
    UnmaskRequest,
)
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.secagg.shamir import SHARE_BYTES, ShamirSharing

_NEW, _KEYS, _SHARES, _MASKED, _DONE = range(5)
_NEXT_STEPS = ("begin", "share", "mask", "unmask", "nothing more")


def _empty_vector() -> Ring:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, kw_only=True)
class MaskingState(RoundContext):
    """State of a client between the stages of a round of masking, stored as a Flower record.

    The record's keys are the names of the attributes, of which the first eight are the context of
    the round. The record holds private keys and must not leave the client.

    Attributes:
        stage: number of the last stage that the client has answered; 0 before the first.
        sealing_private: private key that decrypts the shares from neighbours in the graph.
        masking_private: private key of the pairwise masks.
        seed: seed of the mask that this client alone adds (self-mask).
        threshold: number of shares from which a secret can be recovered.
        peers: numbers of the neighbours, with which this client shares masks.
        masking_keys: public masking key of each neighbour.
        holders: numbers of the clients whose shares this client holds.
        held: for each client in `holders`, its seed share and key share, 66 bytes together.
        payload: the encoded update, ring elements (d,), until it is masked.
    """

    run_id: str = ""
    round_nonce: bytes = b""
    server_round: int = 0
    layout: str = ""
    params: str = ""
    model: str = ""
    asked: str = ""
    plan: str = ""
    stage: int = _NEW
    sealing_private: bytes = b""
    masking_private: bytes = b""
    seed: bytes = b""
    threshold: int = 0
    peers: tuple[int, ...] = ()
    masking_keys: tuple[bytes, ...] = ()
    holders: tuple[int, ...] = ()
    held: tuple[bytes, ...] = ()
    payload: Ring = field(default_factory=_empty_vector)


class MaskedUpload:
    """State machine for one client's side of SecAgg and SecAgg+.

    Guarantee: the client answers each stage of a round once. It never gives shares of both secrets
    (self-mask seed and masking key) of the same peer. It helps to unmask only if at least
    `min_clients` clients (its own setting) and at least the threshold are in the sum. It does so
    only for the peers with which it shares masks. Keys and seeds are fresh from the operating
    system in every round.

    A server that follows the protocol learns only the sum. These checks detect a dishonest server,
    with two exceptions. It can show different client sets to different clients, because there is no
    consistency round. And it can invent clients, which `min_clients` then counts, because no client
    knows the others' keys.

    Args:
        client: number of this client.
        settings: secure aggregation settings of the client.
        state: stored state; None before the first round.
        num_clients: number of clients in the client's experiment, which are numbered from 0.
    """

    def __init__(
        self,
        *,
        client: int,
        settings: SecureAggregationSettings,
        state: MaskingState | None = None,
        num_clients: int = MAX_CLIENTS,
    ) -> None:
        self.client = client
        self.state = state or MaskingState()
        self._settings = settings
        self._num_clients = num_clients

    def begin(self, offer: RoundOffer, payload: Ring) -> KeysReply:
        """Begin a round and return the client's new public keys.

        Args:
            offer: the round's parameters, as the server announced them.
            payload: the update that `SecureUploader.encode_payload` encoded, ring elements (d,).

        Raises:
            ContextMismatchError: the client's settings differ, or name another protocol.
            ProtocolOrderError: the round has ended, or began before.
            WireError: a field of the offer is malformed.
        """
        settings = self._settings
        if not settings.protocol.name.startswith("secagg") or offer.params != settings.digest():
            raise ContextMismatchError(
                f"the client runs protocol {settings.protocol.name} with other settings than the "
                "server; nothing was uploaded",
                round_number=offer.server_round,
                client=self.client,
            )
        self._check_fresh(offer)
        check_fields(offer)
        sealing, masking = SealingKey.generate(), SealingKey.generate()
        self.state = MaskingState(
            **offer.values(),
            stage=_KEYS,
            sealing_private=sealing.to_bytes(),
            masking_private=masking.to_bytes(),
            payload=payload,
        )
        return KeysReply(client=self.client, sealing_key=sealing.public, masking_key=masking.public)

    def share(self, roster: Roster) -> SharesReply:
        """Return shares of a new self-mask seed and of the masking key, encrypted for neighbours.

        Args:
            roster: the neighbours that get shares, with their keys and Shamir evaluation points.

        Raises:
            WireError: a field is malformed, or clients, points and keys do not match.
            ThresholdError: the threshold differs from the client's settings. In a sparse graph, it
                is not more than half of the neighbours, or is more than all of them.
            TooFewClientsError: the round has fewer clients than this client's `min_clients`.
            PublicKeyError: a key is unusable or repeated, or the roster's key for this client is
                not the key that the client made.
        """
        self._check_stage(_KEYS)
        check_fields(roster)
        self._check_minimum("announced", roster.clients)
        self._check_places(roster)
        self._check_threshold(roster)
        self._check_keys(roster)
        seed = new_seed()
        sharing = ShamirSharing(roster.threshold)
        seed_shares = sharing.split(seed, roster.points)
        key_shares = sharing.split(self.state.masking_private, roster.points)
        receivers, envelopes, kept = [], [], []
        parts = zip(roster.clients, roster.sealing_keys, seed_shares, key_shares, strict=True)
        for holder, key, seed_share, key_share in parts:
            if holder == self.client:
                kept.append(seed_share + key_share)
                continue
            info = secret_share_info(self.state, self.client, holder)
            receivers.append(holder)
            envelopes.append(seal(seed_share + key_share, key, info=info))
        self.state = replace(
            self.state,
            stage=_SHARES,
            seed=seed,
            threshold=roster.threshold,
            peers=roster.clients,
            masking_keys=roster.masking_keys,
            holders=(self.client,) if kept else (),
            held=tuple(kept),
        )
        return SharesReply(
            client=self.client,
            receivers=tuple(receivers),
            envelopes=tuple(envelopes),
            commitment=commitment(self.state, self.client, seed),
        )

    def mask(self, request: MaskRequest) -> MaskedReply:
        """Decrypt the neighbours' shares and return the update with all masks added.

        Args:
            request: the neighbours that sent shares, with the encrypted shares for this client.

        Raises:
            EnvelopeError: a neighbour's share cannot be decrypted.
            ThresholdError: fewer neighbours than the threshold are left.
            WireError: a sender is unknown or occurs twice, or an encrypted share has a wrong
                length.
        """
        self._check_stage(_SHARES)
        check_fields(request)
        state = self.state
        self._check_senders(request)
        key = SealingKey.from_bytes(state.sealing_private)
        holders, held = list(state.holders), list(state.held)
        for sender, envelope in zip(request.senders, request.envelopes, strict=True):
            info = secret_share_info(state, sender, self.client)
            holders.append(sender)
            held.append(key.open(envelope, info=info, client=sender))
        masked = state.payload.copy()
        self._apply_masks(masked, request.senders)
        # Payload, seed and masking key are not needed again: a deleted secret cannot leak.
        self.state = replace(
            state,
            stage=_MASKED,
            holders=tuple(holders),
            held=tuple(held),
            payload=_empty_vector(),
            seed=b"",
            masking_private=b"",
        )
        tag = vector_tag(masked, masked_info(state, self.client))
        return MaskedReply(client=self.client, masked=masked, tag=tag)

    def unmask(self, request: UnmaskRequest) -> UnmaskReply:
        """Return seed shares of clients in the sum, and key shares of clients that dropped out.

        Args:
            request: the clients with a masked update (active) and those that dropped out (dead).

        Raises:
            UnmaskRefusedError: the request could reveal single updates, or the client answered such
                a request in this round before.
            TooFewClientsError: there are fewer active parties than the client's `min_clients`.
            WireError: a field is malformed.
        """
        if self.state.stage == _DONE:
            raise UnmaskRefusedError("the client unmasks once in a round", **self._where)
        self._check_stage(_MASKED)
        check_fields(request)
        self._check_unmask(request)
        held = dict(zip(self.state.holders, self.state.held, strict=True))
        self.state = replace(self.state, stage=_DONE, holders=(), held=())
        return UnmaskReply(
            client=self.client,
            active=request.active,
            seed_shares=tuple(held[peer][:SHARE_BYTES] for peer in request.active),
            dead=request.dead,
            key_shares=tuple(held[peer][SHARE_BYTES:] for peer in request.dead),
        )

    def _check_fresh(self, offer: RoundOffer) -> None:
        """Refuse a round that has ended, as the difference of two sums reveals single updates."""
        state = self.state
        if offer.run_id != state.run_id or offer.server_round > state.server_round:
            return
        over = state.stage == _DONE or offer.server_round < state.server_round
        if over or offer.round_nonce == state.round_nonce:
            raise ProtocolOrderError(
                f"the client has answered this attempt already and is at round "
                f"{state.server_round}; continue with the next round",
                round_number=offer.server_round,
                client=self.client,
            )

    def _check_places(self, roster: Roster) -> None:
        """Check that the clients and points of a roster ascend and are in range.

        A roster that names the client itself is of a complete graph, whose n points are 1 to n.
        """
        clients, points, n = roster.clients, roster.points, len(roster.clients)
        complete = self.client in clients
        known = self._num_clients
        highest = n if complete else known
        keys = len(roster.sealing_keys), len(roster.masking_keys)
        reasons = (
            ({len(points), *keys} != {n}, f"has {n} clients, {len(points)} points, {keys} keys"),
            (list(clients) != sorted(set(clients)), "names a client twice, or out of order"),
            (list(points) != sorted(set(points)), "names a point twice, or out of order"),
            (max(clients) >= known, f"names client {max(clients)}, and clients are below {known}"),
            (max(points, default=0) > highest, f"names a point above {highest}"),
            (
                not complete and self._settings.protocol.name == "secagg",
                "leaves out the client itself",
            ),
        )
        for wrong, reason in reasons:
            if wrong:
                raise WireError(f"the roster {reason}", **self._where)

    def _check_threshold(self, roster: Roster) -> None:
        holders = len(roster.clients)
        least, most = holders // 2 + 1, holders
        if self.client in roster.clients:
            least = most = complete_threshold(self._settings, holders)
        if not least <= roster.threshold <= most:
            rule = f"be {least}" if least == most else f"be from {least} to {most}"
            raise ThresholdError(
                f"the server announced threshold {roster.threshold} for {holders} holders; it must "
                f"{rule}",
                have=roster.threshold,
                need=least,
                **self._where,
            )

    def _check_keys(self, roster: Roster) -> None:
        """Check that all keys are usable and distinct, and that the server kept this client's."""
        state = self.state
        rows = zip(roster.clients, roster.sealing_keys, roster.masking_keys, strict=True)
        for client, *keys in rows:
            for key, mine in zip(keys, (state.sealing_private, state.masking_private), strict=True):
                load_public_key(key, owner=client)
                if client == self.client and key != SealingKey.from_bytes(mine).public:
                    raise PublicKeyError(
                        "the server announced a key for this client that it did not send",
                        client=client,
                    )
        check_distinct((*roster.sealing_keys, *roster.masking_keys))

    def _check_minimum(self, verb: str, others: tuple[int, ...]) -> None:
        """Check that a client set of the server has at least `min_clients` of the settings."""
        parties, least = len({*others, self.client}), self._settings.min_clients
        if parties < least:
            raise TooFewClientsError(
                f"the server {verb} {parties} parties, below the client's own min_clients {least}",
                **self._where,
            )

    def _check_senders(self, request: MaskRequest) -> None:
        senders = set(request.senders)
        known = senders <= set(self.state.peers) - {self.client}
        if not known or not (len(senders) == len(request.senders) == len(request.envelopes)):
            raise WireError(
                "the senders must be announced neighbours, each once, with one envelope each",
                client=self.client,
            )
        have = len(senders) + len(self.state.holders)
        if have < self.state.threshold:
            raise ThresholdError(
                "too few neighbours are left",
                have=have,
                need=self.state.threshold,
                **self._where,
            )

    def _check_unmask(self, request: UnmaskRequest) -> None:
        self._check_minimum("asks to unmask", request.active)
        active, dead = set(request.active), set(request.dead)
        reasons = (
            (self.client in dead, "calls the client itself dead"),
            (bool(active & dead), "lists clients as active and as dead"),
            (active | dead != set(self.state.holders), "is not about the clients masked with"),
            (len(active) < self.state.threshold, "has fewer active clients than the threshold"),
            (len(active) + len(dead) != len(request.active) + len(request.dead), "repeats clients"),
        )
        for wrong, reason in reasons:
            if wrong:
                raise UnmaskRefusedError(
                    f"the request {reason}; answering could reveal a single update",
                    **self._where,
                )

    def _apply_masks(self, vector: Ring, peers: tuple[int, ...]) -> None:
        state = self.state
        keys = dict(zip(state.peers, state.masking_keys, strict=True))
        masking = PairwiseMasks(state, SeedExpander(self._settings.prg))
        masking.add_self_mask(self.client, state.seed)
        for peer in peers:
            masking.add_pairwise_mask(self.client, state.masking_private, peer, keys[peer])
        masking.apply(vector)

    def _check_stage(self, stage: int) -> None:
        if self.state.stage != stage:
            raise ProtocolOrderError(
                f"asked to {_NEXT_STEPS[stage]} where {_NEXT_STEPS[self.state.stage]} is next",
                **self._where,
            )

    @property
    def _where(self) -> dict[str, int]:
        return {"round_number": self.state.server_round, "client": self.client}
