"""Encryption of clients' updates for secure aggregation, as the last step before the upload.

Differential privacy and injected faults are applied before the encryption. With the protocol
`additive`, the client sends a share and encrypted seeds. With pairwise masks, it sends public keys,
and later the masked update.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message, RecordDict

from fedsim.clients.faults import ClientFailureError
from fedsim.clients.secure.additive_upload import SecureUploader
from fedsim.clients.secure.masked_upload import MaskedUpload, MaskingState
from fedsim.core.streams import Purpose, stream
from fedsim.protocol.arrays import is_live, to_numpy, upload_base
from fedsim.protocol.messages import (
    MASKED,
    SECAGG,
    SHARES,
    UNMASK,
    SealedReply,
    TrainReply,
    TrainRequest,
)
from fedsim.protocol.secure import from_records, load_state, make_reply, save_state, to_records
from fedsim.secagg.errors import (
    ContextMismatchError,
    InvalidWeightError,
    NonFiniteUpdateError,
    SecureAggregationError,
    ValueOutOfRangeError,
)
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.messages import MaskRequest, Roster, RoundOffer, UnmaskRequest
from fedsim.secagg.payload import PayloadCodec
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.secagg.wire import to_refusal

MASKING_STATE_RECORD = "secagg-client"
_StageHandler = Callable[[MaskedUpload, RecordDict], object]
_STAGES: Mapping[str, _StageHandler] = {
    SHARES: lambda upload, content: upload.share(from_records(Roster, content)),
    MASKED: lambda upload, content: upload.mask(from_records(MaskRequest, content)),
    UNMASK: lambda upload, content: upload.unmask(from_records(UnmaskRequest, content)),
}


@dataclass(frozen=True)
class SecureChannel:
    """Channel that encrypts the updates of a process's clients for secure aggregation.

    Guarantee: the update, the weight and the metrics in a reply are not readable, unless the
    client's settings say `quantized`. Seeds and keys always come from the operating system, even in
    seeded simulations, because the aggregate does not depend on them.

    Attributes:
        settings: secure aggregation settings of the clients; a server cannot weaken them.
        codec: codec from arrays of the model to ring elements (integers modulo a power of 2).
        weights: planned aggregation weight of each client.
        seed: seed of the random streams for stochastic rounding.
        plan: digest of the privacy plan, which the client computes itself; "" without privacy.
        identity_of: function from a client's number to its long-term signing key, or None.
    """

    settings: SecureAggregationSettings
    codec: PayloadCodec
    weights: tuple[int, ...]
    seed: int
    plan: str = ""
    identity_of: Callable[[int], IdentityKey | None] = lambda client: None

    def check_identity(self, client: int) -> None:
        """Check that a client's long-term key can be read, before the client is charged.

        Raises:
            ClientFailureError: the key cannot be read.
        """
        try:
            self.identity_of(client)
        except SecureAggregationError as error:
            raise ClientFailureError(_text_without_values(error)) from error

    def seal(
        self,
        client: int,
        request: TrainRequest,
        reply: TrainReply,
        *,
        model_digest: str,
        metrics: Mapping[str, float],
        context: Context,
    ) -> SealedReply:
        """Return a client's reply in a form that the server cannot read without the protocol.

        Args:
            client: number of the client.
            request: the train request.
            reply: the client's reply with the readable update.
            model_digest: digest of the request's model, which the client computed itself.
            metrics: each declared metric's mean over the client's examples, by name.
            context: Flower's context of the client, which stores its state for later stages.

        Raises:
            ClientFailureError: the update cannot be encoded, server and client have different
                settings, or the client's long-term key cannot be read. The message holds no value
                of the update and no weight.
        """
        if request.offer is None:
            raise ClientFailureError(
                "the server requests an update in clear, but this client's experiment has "
                "secure_aggregation; nothing was sent. Run the same experiment on both sides"
            )
        arguments: dict[str, Any] = {
            "arrays": reply.arrays,
            "reference": to_numpy(upload_base(request.arrays)),
            "model_digest": model_digest,
            "weight": self.weights[client],
            "metrics": metrics,
            "rng": stream(
                self.seed, Purpose.ROUNDING, client=client, round_number=request.round_number
            ),
        }
        try:
            uploader = SecureUploader(
                client, self.settings, self.codec, self.plan, self.identity_of(client)
            )
            offer = from_records(RoundOffer, RecordDict({SECAGG: request.offer}))
            if offer.server_round != request.round_number:
                raise ContextMismatchError(
                    f"the offer is of round {offer.server_round}, and the request of round "
                    f"{request.round_number}; nothing was uploaded",
                    client=client,
                )
            if self.settings.protocol.name.startswith("secagg"):
                upload = self._masked_upload(client, context)
                sealed = upload.begin(offer, uploader.encode_payload(offer, **arguments))
                save_state(upload.state, context, name=MASKING_STATE_RECORD)
            else:
                sealed = uploader.upload(offer, **arguments)
        except SecureAggregationError as error:
            raise ClientFailureError(_text_without_values(error)) from error
        records = to_records(sealed, live=is_live(request.arrays))
        return SealedReply(RecordDict({**records}), reply.spend, reply.delay)

    def answer(self, stage: str, client: int, message: Message, context: Context) -> Message:
        """Return the client's reply to one stage of pairwise masking.

        Errors are sent as replies, because Flower discards the state of an app that raised.

        Args:
            stage: message type of the query, one of `protocol.messages.STAGES`.
            client: number of the client.
            message: the query of the server.
            context: Flower's context of the client, which stores the client's state.
        """
        try:
            upload = self._masked_upload(client, context)
            reply = _STAGES[stage](upload, message.content)
            save_state(upload.state, context, name=MASKING_STATE_RECORD)
        except SecureAggregationError as error:
            reply = to_refusal(error)
        return make_reply(reply, message)

    def _masked_upload(self, client: int, context: Context) -> MaskedUpload:
        return MaskedUpload(
            client=client,
            settings=self.settings,
            state=load_state(MaskingState, context, name=MASKING_STATE_RECORD),
            num_clients=len(self.weights),
        )


def _text_without_values(error: SecureAggregationError) -> str:
    """Return an error's text for the server, without values of updates, counts or weights."""
    tensor = error.detail.get("tensor")
    match error:
        case NonFiniteUpdateError() if "metric" in error.detail:
            text = f"metric {error.detail['metric']!r} is NaN or infinite; lower the learning rate"
        case NonFiniteUpdateError():
            text = f"array {tensor!r} has NaN or infinite values"
        case ValueOutOfRangeError():
            text = (
                f"array {tensor!r} has values above value_bound {error.detail.get('bound')}; raise "
                "secure_aggregation.encoding.value_bound, or set range_policy: clip"
            )
        case InvalidWeightError():
            text = "the weight is not from 1 to secure_aggregation.encoding.max_weight; raise it"
        case _:
            text = str(error)
    return f"{type(error).__name__}: {text}"
