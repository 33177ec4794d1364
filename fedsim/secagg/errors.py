"""Errors of secure aggregation, one class for each fault; no fault leads to a wrong model."""

from fedsim.core.errors import FedsimError


class SecureAggregationError(FedsimError):
    """Base class of the errors for which a round, or one client's message in it, is refused.

    Attributes:
        round_number: number of the round; None outside of a round.
        client: the number of the client at fault; None if no client is at fault.
        detail: values of the error by name, for a text that must not hold all of them.
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
    """Raised if a sum has fewer than `min_clients` clients and would reveal too much about each."""


def check_enough_clients(have: int, min_clients: int, *, round_number: int) -> None:
    """Check that a sum has at least `min_clients` clients.

    Raises:
        TooFewClientsError: it has fewer.
    """
    if have < min_clients:
        raise TooFewClientsError(
            f"{have} clients are left, but min_clients is {min_clients}; "
            "ask more clients, or lower min_clients",
            round_number=round_number,
        )


class LayoutMismatchError(SecureAggregationError):
    """Raised if names, shapes, dtypes or order of arrays are not the announced ones."""


class NonFiniteUpdateError(SecureAggregationError):
    """Raised for NaN or infinite values in an update, which the ring would turn into numbers."""


class ValueOutOfRangeError(SecureAggregationError):
    """Raised for a value that is above the value bound and does not fit into the ring."""


class InvalidWeightError(SecureAggregationError):
    """Raised for a weight that is not a whole number from 1 to `max_weight`."""


class ZeroWeightError(SecureAggregationError):
    """Raised if the total weight of a sum is 0, so that there is no mean."""


class CapacityError(SecureAggregationError):
    """Raised if the sums of a round may not fit into the ring, or if an upload is too long."""


class ReplayError(SecureAggregationError):
    """Raised for a message of an earlier round or of another run."""


class EnvelopeError(SecureAggregationError):
    """Raised for a sealed secret that does not open in the context of its round."""


class DuplicateClientError(SecureAggregationError):
    """Raised if a client sends a second message in one stage of a round."""


class ContextMismatchError(SecureAggregationError):
    """Raised if server, helpers and clients disagree on run, round, model, layout or settings."""


class AlreadyAnsweredError(SecureAggregationError):
    """Raised if a second sum of a round is requested; two sums could reveal single updates."""


class AggregatorUnavailableError(SecureAggregationError):
    """Raised if an aggregator does not answer, although the sum needs the aggregator's share."""


class ShareMismatchError(SecureAggregationError):
    """Raised if shares do not belong together, or were damaged in transit."""


class ThresholdError(SecureAggregationError):
    """Raised if there are fewer shares than the threshold of the secret sharing.

    Args:
        message: the beginning of the error's text.
        have: the number of shares.
        need: the threshold.
        where: `round_number` and `client` of the error, as for `SecureAggregationError`.
    """

    def __init__(self, message: str, *, have: int, need: int, **where: int | None) -> None:
        super().__init__(
            f"{message}: {have} of the {need} that are needed",
            round_number=where.get("round_number"),
            client=where.get("client"),
        )


class UnmaskRefusedError(SecureAggregationError):
    """Raised for a request for unmasking shares that would reveal a single client's update."""


class PublicKeyError(SecureAggregationError):
    """Raised for a public key that is malformed, of low order, reused, or not the pinned one."""


class WireError(SecureAggregationError):
    """Raised for a message that does not follow the wire format."""


class ProtocolOrderError(SecureAggregationError):
    """Raised if a step of the protocol is called out of order or twice."""


_BY_NAME = {
    error.__name__: error
    for error in SecureAggregationError.__subclasses__()
    if error is not ThresholdError
}


def error_by_name(kind: str, message: str) -> SecureAggregationError:
    """Return the error that another party reported, as an object of the reported class.

    Args:
        kind: the name of the error's class; an unknown name gives the base class.
        message: the text of the error.
    """
    return _BY_NAME.get(kind, SecureAggregationError)(message)
