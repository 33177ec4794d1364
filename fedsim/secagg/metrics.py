"""Declared metrics of clients, each on a grid of its own beside the update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite

from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.errors import CapacityError, NonFiniteUpdateError


@dataclass(frozen=True)
class MetricGrid:
    """Fixed point for one metric: the places of the update, or fewer where its bound is larger.

    Guarantee: |encoded mean - clipped mean| ≤ 2^-(places + 1), and w_max units fit wherever those
    of an update's coordinate do, so that the capacity of the ring holds for metrics, too.

    Attributes:
        name: of the metric.
        bound: clients clip the metric to [-bound, bound].
        places: binary places ≥ 0.
    """

    name: str
    bound: float
    places: int

    @classmethod
    def of(cls, name: str, bound: float, encoder: FixedPointEncoder) -> "MetricGrid":
        """Return the finest grid that a metric can have beside the updates of `encoder`.

        Raises:
            CapacityError: not even whole numbers up to `bound` fit.
        """
        for places in range(encoder.frac_bits, -1, -1):
            if ceil(Fraction(bound) * 2**places) <= encoder.max_value:
                return cls(name, bound, places)
        raise CapacityError(
            f"metric {name!r} with bound {bound} does not fit beside values up to "
            f"{encoder.max_value} units; lower its bound, or raise frac_bits or value_bound"
        )

    def units(self, value: float) -> int:
        """Return the clipped value on the grid, rounded to nearest, ties to even."""
        clipped = min(max(value, -self.bound), self.bound)
        return round(Fraction(clipped) * 2**self.places)

    def mean(self, units: int, weight: int) -> float:
        """Return the mean of a sum of weighted units over the total weight."""
        return float(Fraction(units, weight * 2**self.places))


@dataclass(frozen=True)
class MetricGrids:
    """The metrics that clients declared, in order; they are coordinates like those of an update.

    A payload holds w m for each metric m, and one more coordinate: whether the client clipped any,
    so that a mean of clipped values is known to be one.
    """

    grids: tuple[MetricGrid, ...] = ()

    @classmethod
    def of(cls, bounds: Mapping[str, float], encoder: FixedPointEncoder) -> "MetricGrids":
        """Return the grids of metrics by their bounds.

        Raises:
            CapacityError: a bound is too large.
        """
        return cls(tuple(MetricGrid.of(name, bound, encoder) for name, bound in bounds.items()))

    @property
    def length(self) -> int:
        """Ring elements that metrics take: none, or one for each and the clip mark."""
        return len(self.grids) + bool(self.grids)

    def encode(
        self, values: Mapping[str, float], weight: int, *, client: int | None = None
    ) -> list[int]:
        """Return a client's coordinates.

        Args:
            values: a mean over the client's examples for each metric.
            weight: w of the client.
            client: named in errors.

        Raises:
            ValueError: not exactly the declared metrics.
            NonFiniteUpdateError: NaN or an infinite value.
        """
        names = [grid.name for grid in self.grids]
        if set(values) != set(names):
            raise ValueError(f"metrics must be exactly the declared {names}, got {list(values)}")
        for name in names:
            if not isfinite(values[name]):
                raise NonFiniteUpdateError(
                    f"metric {name!r} is {values[name]}; lower the learning rate",
                    client=client,
                    metric=name,
                )
        if not self.grids:
            return []
        clipped = any(abs(values[grid.name]) > grid.bound for grid in self.grids)
        return [*(weight * grid.units(values[grid.name]) for grid in self.grids), int(clipped)]

    def decode(self, sums: Sequence[int], weight: int) -> tuple[dict[str, float], int]:
        """Return the weighted mean of each metric, and how many clients clipped one."""
        means = {
            grid.name: grid.mean(units, weight)
            for grid, units in zip(self.grids, sums, strict=False)
        }
        return means, sums[-1] if self.grids else 0


NO_METRICS = MetricGrids()
