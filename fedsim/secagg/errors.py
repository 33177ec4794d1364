"""What can go wrong in secure aggregation: every fault has a name, and no fault a wrong model."""

from fedsim.core.errors import FedsimError


class SecureAggregationError(FedsimError):
    """A round, or one client's part in it, that cannot be trusted and was therefore refused.

    Attributes:
        round_number: the round, where there is one.
        client: the client at fault, where there is one.
        detail: what a program may want to know, by name.
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
    """Fewer clients than `min_clients`: their sum would say too much about each of them."""


class LayoutMismatchError(SecureAggregationError):
    """Arrays whose names, shapes, types or order are not the announced ones."""


class NonFiniteUpdateError(SecureAggregationError):
    """An update with NaN or infinite values; the ring would turn them into ordinary numbers."""


class ValueOutOfRangeError(SecureAggregationError):
    """A value beyond the value bound, for which the ring has no room."""


class InvalidWeightError(SecureAggregationError):
    """A weight that is not a whole number from 1 to the largest admissible one."""


class ZeroWeightError(SecureAggregationError):
    """A total weight of zero: there is no mean."""


class CapacityError(SecureAggregationError):
    """A configuration whose largest possible sum does not fit into the ring."""


class ReplayError(SecureAggregationError):
    """A message of an earlier round or of another run."""


class EnvelopeError(SecureAggregationError):
    """A sealed seed that does not open in the context it was sent in."""


class DuplicateClientError(SecureAggregationError):
    """A client that came twice in one round."""


class ContextMismatchError(SecureAggregationError):
    """Parties that do not agree on run, round, model, layout or parameters."""


class AlreadyAnsweredError(SecureAggregationError):
    """A second, different question about a round that was answered: two sums give a difference."""


class AggregatorUnavailableError(SecureAggregationError):
    """An aggregator without which the sum cannot be opened."""


class ShareMismatchError(SecureAggregationError):
    """Shares that do not belong together, or were damaged on the way."""


class ThresholdError(SecureAggregationError):
    """Fewer shares than the threshold of the secret sharing."""

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
    """A step of the protocol taken before its turn, or a second time."""


_BY_NAME = {
    error.__name__: error
    for error in SecureAggregationError.__subclasses__()
    if error is not ThresholdError
}


def refusal(kind: str, message: str) -> SecureAggregationError:
    """Return the error that another party reported by the name of its class and its words."""
    return _BY_NAME.get(kind, SecureAggregationError)(message)
