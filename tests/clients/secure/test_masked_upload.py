"""The client's checks of a server that does not follow the protocol."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsim.clients.secure.masked_upload import MaskedUpload, MaskingState
from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.errors import (
    ContextMismatchError,
    EnvelopeError,
    ProtocolOrderError,
    PublicKeyError,
    SecureAggregationError,
    ThresholdError,
    TooFewClientsError,
    UnmaskRefusedError,
    WireError,
)
from fedsim.secagg.messages import RoundOffer
from fedsim.secagg.payload import PayloadCodec, TensorLayout
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.secagg.wire import from_record, to_record
from fedsim.server.secure.masked_sum import MaskedSum

SETTINGS = SecureAggregationSettings.model_validate({"protocol": "secagg"})
REFERENCE = {"w": np.zeros(2, np.float32)}
LAYOUT = TensorLayout.from_arrays(REFERENCE)
CODEC = PayloadCodec(
    FixedPointEncoder.from_settings(SETTINGS.encoding, num_clients=6, weighted=False), LAYOUT
)


class Round:
    """Six clients, brought up to a stage."""

    def __init__(self, server_round: int = 1, clients: dict[int, MaskedUpload] | None = None):
        context = RoundContext(
            run_id="run",
            round_nonce=bytes([server_round]) * 16,
            server_round=server_round,
            layout=LAYOUT.digest,
            params=SETTINGS.digest(),
            model="m",
            asked="a",
            plan="",
        )
        self.server = MaskedSum(codec=CODEC, context=context, settings=SETTINGS, clients=range(6))
        self.clients = clients or {n: MaskedUpload(client=n, settings=SETTINGS) for n in range(6)}

    def payload(self) -> Any:
        return CODEC.encode(REFERENCE, reference=REFERENCE, weight=1)

    def keys(self) -> "Round":
        for client in self.clients.values():
            self.server.take_keys(client.begin(self.server.offer(), self.payload()))
        self.rosters = self.server.rosters()
        return self

    def shares(self) -> "Round":
        for number, roster in self.rosters.items():
            self.server.take_shares(self.clients[number].share(roster))
        self.requests = self.server.mask_requests()
        return self

    def masked(self, silent: int = 5) -> "Round":
        for number, request in self.requests.items():
            if number != silent:
                self.server.take_masked(self.clients[number].mask(request))
        self.unmasks = self.server.unmask_requests()
        return self


def test_every_upload_has_a_mask_of_its_own_beside_those_that_cancel() -> None:
    """Else the sum of all uploads is open before anyone unmasks it."""
    one = Round().keys().shares()
    uploads = [one.clients[number].mask(request).masked for number, request in one.requests.items()]
    payload = one.payload()
    assert (np.sum(uploads, axis=0, dtype=payload.dtype) != 6 * payload).all()


@pytest.mark.parametrize(
    ("active", "dead", "reason"),
    [
        ((0, 1, 2, 3, 4), (4, 5), "as active and as dead"),
        ((0, 1, 2, 3, 4), (), "not about the clients masked with"),
        ((0, 1, 2, 3, 4), (5, 6), "not about the clients masked with"),
        ((0, 1, 2, 3), (4, 5), "fewer active clients than the threshold"),
        ((0, 0, 1, 2, 3, 4), (5,), "repeats clients"),
    ],
)
def test_unmasking_that_reveals_single_updates_is_refused(
    active: tuple[int, ...], dead: tuple[int, ...], reason: str
) -> None:
    one = Round().keys().shares().masked()
    with pytest.raises(UnmaskRefusedError, match=reason):
        one.clients[0].unmask(replace(one.unmasks[0], active=active, dead=dead))
    honest = one.clients[0].unmask(one.unmasks[0])  # a refusal costs nothing
    assert (honest.active, honest.dead) == ((0, 1, 2, 3, 4), (5,))


def test_a_client_unmasks_once_and_never_again_in_that_round() -> None:
    one = Round().keys().shares().masked()
    client = one.clients[0]
    client.unmask(one.unmasks[0])
    with pytest.raises(UnmaskRefusedError, match="once in a round"):
        client.unmask(one.unmasks[0])
    offer = one.server.offer()
    for again in (offer, replace(offer, round_nonce=b"n" * 16), replace(offer, server_round=0)):
        with pytest.raises(ProtocolOrderError, match="continue with the next round"):
            client.begin(again, one.payload())
    Round(2, one.clients).keys().shares()


def test_an_attempt_that_failed_can_be_repeated_with_new_keys() -> None:
    one = Round().keys()
    offer: RoundOffer = replace(one.server.offer(), round_nonce=b"n" * 16)
    first = one.clients[0].state.masking_private
    one.clients[0].begin(offer, one.payload())
    assert one.clients[0].state.masking_private != first


def test_rosters_that_weaken_the_sharing_are_refused() -> None:
    one = Round().keys()
    roster, client = one.rosters[0], one.clients[0]
    changes: list[tuple[dict[str, Any], type[SecureAggregationError]]] = [
        ({"threshold": 3}, ThresholdError),
        ({"threshold": 7}, ThresholdError),
        ({"points": (1, 1, 3, 4, 5, 6)}, WireError),
        ({"sealing_keys": (roster.sealing_keys[1], *roster.sealing_keys[1:])}, PublicKeyError),
        ({"masking_keys": (bytes(32), *roster.masking_keys[1:])}, PublicKeyError),
    ]
    for change, error in changes:
        with pytest.raises(error):
            client.share(replace(roster, **change))
    few = {
        name: getattr(roster, name)[:2]
        for name in ("clients", "points", "sealing_keys", "masking_keys")
    }
    with pytest.raises(TooFewClientsError, match="below the client's own min_clients"):
        client.share(replace(roster, threshold=2, **few))
    client.share(roster)


def test_envelopes_and_senders_are_checked() -> None:
    one = Round().keys().shares()
    request, client = one.requests[0], one.clients[0]
    swapped = (request.envelopes[1], request.envelopes[0], *request.envelopes[2:])
    with pytest.raises(EnvelopeError):
        client.mask(replace(request, envelopes=swapped))
    for change in (
        {"senders": (9, *request.senders[1:])},
        {"senders": (request.senders[1], *request.senders[1:])},
        {"envelopes": request.envelopes[1:]},
    ):
        with pytest.raises(WireError):
            client.mask(replace(request, **change))
    with pytest.raises(ThresholdError, match="too few neighbours are left"):
        client.mask(replace(request, senders=request.senders[:2], envelopes=request.envelopes[:2]))


def test_stages_come_in_order_and_settings_must_agree() -> None:
    one = Round().keys()
    client = one.clients[0]
    with pytest.raises(ProtocolOrderError, match="asked to unmask where share is next"):
        client.unmask(None)  # type: ignore[arg-type]
    for protocol in ("additive", "secagg_plus"):
        other = SecureAggregationSettings.model_validate({"protocol": protocol})
        with pytest.raises(ContextMismatchError, match="nothing was uploaded"):
            MaskedUpload(client=1, settings=other).begin(one.server.offer(), one.payload())


def test_the_state_survives_a_transport_between_all_stages() -> None:
    def moved(client: MaskedUpload) -> MaskedUpload:
        record = to_record(client.state)
        state = from_record(MaskingState, record.config, record.arrays)
        return MaskedUpload(client=client.client, settings=SETTINGS, state=state)

    one = Round()
    for stage in (one.keys, one.shares, one.masked):
        stage()
        one.clients.update({number: moved(client) for number, client in one.clients.items()})
    for number, request in one.unmasks.items():
        one.server.take_unmask(one.clients[number].unmask(request))
    assert one.server.open(reference=REFERENCE).num_clients == 5


def test_secrets_that_have_served_are_forgotten() -> None:
    one = Round().keys().shares().masked()
    state = one.clients[0].state
    assert (state.seed, state.masking_private, len(state.payload)) == (b"", b"", 0)
    one.clients[0].unmask(one.unmasks[0])
    assert one.clients[0].state.held == ()
