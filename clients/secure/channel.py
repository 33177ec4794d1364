"""The last thing that happens to an update before it leaves a client: it is sealed.

Everything else comes before, differential privacy and injected faults included. What leaves is a
share and sealed seeds, or, with pairwise masks, public keys first and the masked update stages
later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.clients.failure_text import ClientFailureError
from fedsim.clients.secure.additive_upload import SecureUploader
from fedsim.clients.secure.masked_upload import MaskedUpload, MaskingState
from fedsim.core.streams import Purpose, stream
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.live_arrays import is_live
from fedsim.protocol.messages import (
    TrainReply,
    TrainRequest,
)
from fedsim.protocol.secure import (
    MASKED,
    SECAGG,
    SHARES,
    UNMASK,
    SealedReply,
    answer,
    from_records,
    to_records,
)
from fedsim.secagg.errors import (
    InvalidWeightError,
    NonFiniteUpdateError,
    SecureAggregationError,
    ValueOutOfRangeError,
)
from fedsim.secagg.messages import (
    MaskRequest,
    Roster,
    RoundOffer,
    UnmaskRequest,
)
from fedsim.secagg.payload import PayloadCodec
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.secagg.wire import refuse

STATE = "secagg-client"
_Ask = Callable[[MaskedUpload, RecordDict], object]
STAGES: Mapping[str, _Ask] = {
    SHARES: lambda upload, content: upload.share(from_records(Roster, content)),
    MASKED: lambda upload, content: upload.mask(from_records(MaskRequest, content)),
    UNMASK: lambda upload, content: upload.unmask(from_records(UnmaskRequest, content)),
}


@dataclass(frozen=True)
class SecureChannel:
    """How the clients of a federation send their updates.

    Guarantee: what leaves holds neither the update, nor the weight, nor a metric in clear, unless
    the client's own settings say `quantized`. Seeds and keys come from the operating system in
    seeded simulations, too: the aggregate does not depend on them.

    Attributes:
        settings: the clients' own; a server cannot weaken them.
        codec: the payload, laid out as the clients' own model.
        weighted: whether clients weigh by their examples.
        seed: of the streams of stochastic rounding.
    """

    settings: SecureAggregationSettings
    codec: PayloadCodec
    weighted: bool
    seed: int

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
        """Return what may leave of a client's answer.

        Args:
            client: its number.
            request: what it was asked.
            reply: its answer in clear.
            model_digest: digest of the request's model, computed by the client itself.
            metrics: a mean over the client's examples for each declared metric.
            context: keeps what later stages need.

        Raises:
            ClientFailureError: the update must not be summed, or the parties do not agree. The
                text holds no value of the update and no weight.
        """
        uploader = SecureUploader(client, self.settings, self.codec)
        arguments: dict[str, Any] = {
            "arrays": to_numpy(reply.arrays),
            "reference": to_numpy(request.arrays),
            "model_digest": model_digest,
            "weight": reply.examples if self.weighted else 1,
            "metrics": metrics,
            "rng": stream(
                self.seed, Purpose.ROUNDING, client=client, round_number=request.round_number
            ),
        }
        try:
            offer = from_records(RoundOffer, RecordDict({SECAGG: self._offer(request)}))
            if self.settings.protocol.startswith("secagg"):
                upload = MaskedUpload(client=client, settings=self.settings, state=_state(context))
                sealed = upload.begin(offer, uploader.payload(offer, **arguments))
                _keep(upload.state, context)
            else:
                sealed = uploader.upload(offer, **arguments)
        except SecureAggregationError as error:
            raise ClientFailureError(_without_values(error)) from error
        return SealedReply.of(
            sealed, spend=reply.spend, delay=reply.delay, live=is_live(request.arrays)
        )

    def answer(self, stage: str, client: int, message: Message, context: Context) -> Message:
        """Answer a stage of the exchange of masks; errors are answered, so that state is kept."""
        try:
            upload = MaskedUpload(client=client, settings=self.settings, state=_state(context))
            reply = STAGES[stage](upload, message.content)
            _keep(upload.state, context)
        except SecureAggregationError as error:
            reply = refuse(error)
        return answer(reply, message)

    @staticmethod
    def _offer(request: TrainRequest) -> ConfigRecord:
        if request.offer is None:
            raise ClientFailureError(
                "the server asked for an update in clear, but this client's experiment has "
                "secure_aggregation; nothing was sent. Run the same experiment on both sides"
            )
        return request.offer


def _state(context: Context) -> MaskingState | None:
    if STATE not in context.state.config_records:
        return None
    return from_records(MaskingState, context.state, name=STATE)


def _keep(state: MaskingState, context: Context) -> None:
    for name, record in to_records(state, name=STATE).items():
        context.state[name] = record


def _without_values(error: SecureAggregationError) -> str:
    """Return an error in words that the server may read: without values, counts and weights."""
    tensor = error.detail.get("tensor")
    match error:
        case NonFiniteUpdateError() if "metric" in error.detail:
            what = f"metric {error.detail['metric']!r} is NaN or infinite; lower the learning rate"
        case NonFiniteUpdateError():
            what = f"array {tensor!r} has NaN or infinite values"
        case ValueOutOfRangeError():
            what = (
                f"array {tensor!r} has values above value_bound {error.detail.get('bound')}; raise "
                "secure_aggregation.value_bound, or say range_policy: clip"
            )
        case InvalidWeightError():
            what = "the weight is not from 1 to secure_aggregation.max_weight; raise it"
        case _:
            what = str(error)
    return f"{type(error).__name__}: {what}"
