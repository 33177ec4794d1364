"""The exact sum of integers that clients send in clear."""

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.aggregator import AggregationResult, Aggregator
from fedsim.server.aggregation.mean import InvalidUpdateError

_CAPACITY = 1 << 62  # of |sums| in int64, with room for the noise of a server


class IntegerSum(Aggregator[TrainReply]):
    """The sum of integers that the server sees; exact, so in any order.

    Args:
        plan: names, shapes and bound of a client's integers.
        num_clients: largest number of clients in one sum.

    Raises:
        ValueError: a sum of so many clients could leave int64.
    """

    reply_type = TrainReply
    name = "sums of integers"

    def __init__(self, plan: SumPlan, *, num_clients: int) -> None:
        if plan.bound * num_clients > _CAPACITY:
            raise ValueError(
                f"{num_clients} clients with integers of up to {plan.bound} do not fit into an "
                "int64 sum; ask fewer clients, or give the noise a larger share"
            )
        self._plan = plan
        self._sums: dict[str, np.ndarray] = {}
        self._added = 0

    def begin(
        self, round_number: int, arrays: ArrayRecord, clients: Sequence[int], grid: Grid
    ) -> ConfigRecord | None:
        """Begin a round; its requests carry the model only."""
        shapes = self._plan.shapes.items()
        self._sums = {name: np.zeros(shape, np.int64) for name, shape in shapes}
        self._added = 0
        return None

    def add(self, client: int, answer: TrainReply) -> None:
        """Add the integers of a client.

        Raises:
            InvalidUpdateError: wrong names, shapes or types, or an integer beyond the bound.
        """
        values = to_numpy(answer.arrays)
        check_integers(values, self._plan)
        for name, total in self._sums.items():
            total += values[name]
        self._added += 1

    def skip(self, client: int) -> None:
        """Leave a client out of the sum."""

    def finish(self) -> AggregationResult:
        """Return the sums; without them where no client was added."""
        return AggregationResult(None, sums=self._sums if self._added else None)


def check_integers(values: Mapping[str, np.ndarray], plan: SumPlan) -> None:
    """Check that a client's integers have the layout of the plan and keep its bound.

    Args:
        values: int64 tensors by name.
        plan: names, shapes and bound.

    Raises:
        InvalidUpdateError: they do not.
    """
    if list(values) != list(plan.shapes):
        missing = [name for name in plan.shapes if name not in values]
        extra = [name for name in values if name not in plan.shapes]
        raise InvalidUpdateError(f"arrays differ: missing {missing}, unexpected {extra}")
    for name, value in values.items():
        shape = plan.shapes[name]
        if value.dtype != np.int64 or value.shape != tuple(shape):
            raise InvalidUpdateError(
                f"array {name!r} must be int64{list(shape)}, got {value.dtype}{list(value.shape)}"
            )
        # Not by |value|: the smallest int64 has none.
        if value.size and not -plan.bound <= int(value.min()) <= int(value.max()) <= plan.bound:
            raise InvalidUpdateError(f"array {name!r} has an integer beyond ±{plan.bound}")
