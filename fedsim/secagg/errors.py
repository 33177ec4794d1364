"""Errors of secure aggregation: each fault has its class, and none leads to a wrong model."""

from fedsim.core.errors import FedsimError


class SecureAggregationError(FedsimError):
    """A round, or one client's part in it, that was refused.

    Attributes:
        round_number: number of the round; None outside of a round.
        client: number of the client at fault; None if it is no client's fault.
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
    """Fewer clients than `min_clients`: their sum would reveal too much about each of them."""


class LayoutMismatchError(SecureAggregationError):
    """Arrays whose names, shapes, types or order are not the announced ones."""


class NonFiniteUpdateError(SecureAggregationError):
    """An update with NaN or infinite values; the ring would turn them into ordinary numbers."""


class ValueOutOfRangeError(SecureAggregationError):
    """A value above the value bound, which does not fit into the ring."""


class InvalidWeightError(SecureAggregationError):
    """A weight that is not a whole number from 1 to the largest admissible one."""


class ZeroWeightError(SecureAggregationError):
    """A total weight of zero: there is no mean."""


class CapacityError(SecureAggregationError):
    """A configuration or a sum that does not fit: into the ring, or into one upload."""


class ReplayError(SecureAggregationError):
    """A message of an earlier round or of another run."""


class EnvelopeError(SecureAggregationError):
    """A sealed secret that does not open in the context of its round."""


class DuplicateClientError(SecureAggregationError):
    """A second message of one client in one step of a round."""


class ContextMismatchError(SecureAggregationError):
    """Parties that do not agree on run, round, model, layout or parameters."""


class AlreadyAnsweredError(SecureAggregationError):
    """A second sum of one round was requested; the difference of both reveals single updates."""


class AggregatorUnavailableError(SecureAggregationError):
    """An aggregator that the sum needs does not answer."""


class ShareMismatchError(SecureAggregationError):
    """Shares that do not belong together, or were damaged in transit."""


class ThresholdError(SecureAggregationError):
    """Fewer shares than the threshold of the secret sharing.

    Args:
        message: text of the error.
        have: number of shares.
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
    """A request to unmask that would reveal a single client's update."""


class PublicKeyError(SecureAggregationError):
    """A public key that is malformed, of low order, used twice, or not the pinned one."""


class WireError(SecureAggregationError):
    """A message that does not follow the wire format."""


class ProtocolOrderError(SecureAggregationError):
    """A step of the protocol out of order, or a second time."""


_BY_NAME = {
    error.__name__: error
    for error in SecureAggregationError.__subclasses__()
    if error is not ThresholdError
}


def error_by_name(kind: str, message: str) -> SecureAggregationError:
    """Return the error that another party reported.

    Args:
        kind: name of the error's class; an unknown name gives the base class.
        message: text of the error.
    """
    return _BY_NAME.get(kind, SecureAggregationError)(message)
