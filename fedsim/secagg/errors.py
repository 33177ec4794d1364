"""Errors of secure aggregation, a class for each fault; no fault leads to a wrong model."""

from fedsim.core.errors import FedsimError


class SecureAggregationError(FedsimError):
    """A round, or one client's message in a round, was refused.

    Attributes:
        round_number: the round; None outside of a round.
        client: the number of the client at fault; None if no client is at fault.
        detail: further facts by name, for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        round_number: int | None = None,
        client: int | None = None,
        **detail: object,
    ) -> None:
        where = [] if round_number is None else [f"round {round_number}"]
        where += [] if client is None else [f"client {client}"]
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.round_number = round_number
        self.client = client
        self.detail = detail


class TooFewClientsError(SecureAggregationError):
    """There are fewer clients than `min_clients`: a sum would reveal too much about each client."""


class LayoutMismatchError(SecureAggregationError):
    """The names, shapes, dtypes or order of arrays are not the announced ones."""


class NonFiniteUpdateError(SecureAggregationError):
    """An update has NaN or infinite values, which the ring would turn into ordinary numbers."""


class ValueOutOfRangeError(SecureAggregationError):
    """A value is above the value bound and does not fit into the ring."""


class InvalidWeightError(SecureAggregationError):
    """A weight is not a whole number from 1 to `max_weight`."""


class ZeroWeightError(SecureAggregationError):
    """The total weight of a sum is 0, so there is no mean."""


class CapacityError(SecureAggregationError):
    """A configuration or a sum does not fit into the ring, or into one upload."""


class ReplayError(SecureAggregationError):
    """A message is of an earlier round or of another run."""


class EnvelopeError(SecureAggregationError):
    """A sealed secret does not open in the context of its round."""


class DuplicateClientError(SecureAggregationError):
    """A client sent a second message in one stage of a round."""


class ContextMismatchError(SecureAggregationError):
    """The parties do not agree on run, round, model, layout or parameters."""


class AlreadyAnsweredError(SecureAggregationError):
    """A second sum of a round was requested; the difference of two sums reveals single updates."""


class AggregatorUnavailableError(SecureAggregationError):
    """An aggregator whose share the sum needs does not answer."""


class ShareMismatchError(SecureAggregationError):
    """Shares do not belong together, or were damaged in transit."""


class ThresholdError(SecureAggregationError):
    """There are fewer shares than the threshold of the secret sharing.

    Args:
        message: the beginning of the error's text.
        have: the number of shares.
        need: the threshold.
        where: `round_number` and `client`, as in the base class.
    """

    def __init__(self, message: str, *, have: int, need: int, **where: int | None) -> None:
        super().__init__(
            f"{message}: {have} of the {need} that are needed",
            round_number=where.get("round_number"),
            client=where.get("client"),
            have=have,
            need=need,
        )


class UnmaskRefusedError(SecureAggregationError):
    """A request for unmasking shares would reveal a single client's update."""


class PublicKeyError(SecureAggregationError):
    """A public key is malformed, of low order, used twice, or not the pinned one."""


class WireError(SecureAggregationError):
    """A message does not follow the wire format."""


class ProtocolOrderError(SecureAggregationError):
    """A step of the protocol was called out of order or twice."""


_BY_NAME = {
    error.__name__: error
    for error in SecureAggregationError.__subclasses__()
    if error is not ThresholdError
}


def error_by_name(kind: str, message: str) -> SecureAggregationError:
    """Return the error that another party reported.

    Args:
        kind: the name of the error's class; an unknown name gives the base class.
        message: the text of the error.
    """
    return _BY_NAME.get(kind, SecureAggregationError)(message)
