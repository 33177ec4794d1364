"""Fixed-point encoding of declared metrics, which are summed securely together with the update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite

from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.errors import CapacityError, NonFiniteUpdateError


@dataclass(frozen=True)
class MetricGrid:
    """The fixed-point encoding of one metric, with at most as many fraction bits as the update.

    Guarantee: |encoded mean - clipped mean| ≤ 2^-(frac_bits + 1). An encoded metric is never larger
    than an encoded coordinate of the update, so the capacity check of the update covers metrics.

    Attributes:
        name: the name of the metric.
        bound: clients clip the metric to [-bound, bound].
        frac_bits: the number f ≥ 0 of fraction bits of the encoded metric.
    """

    name: str
    bound: float
    frac_bits: int

    @classmethod
    def from_bound(cls, name: str, bound: float, encoder: FixedPointEncoder) -> "MetricGrid":
        """Return a metric's encoding, with as many fraction bits as the update's encoder allows.

        An encoded metric is then never larger than the largest encoded value of an update.

        Args:
            name: the name of the metric.
            bound: the clipping bound of the metric, > 0.
            encoder: the encoder of the update.

        Raises:
            CapacityError: even without fraction bits, numbers up to `bound` do not fit.
        """
        for frac_bits in range(encoder.frac_bits, -1, -1):
            if ceil(Fraction(bound) * 2**frac_bits) <= encoder.max_value:
                return cls(name, bound, frac_bits)
        raise CapacityError(
            f"metric {name!r} with bound {bound} does not fit beside values up to "
            f"{encoder.max_value} units; lower its bound, or raise frac_bits or value_bound"
        )

    def units(self, value: float) -> int:
        """Return a metric's value, clipped and rounded (ties to even), in units of 2^-frac_bits."""
        clipped = min(max(value, -self.bound), self.bound)
        return round(Fraction(clipped) * 2**self.frac_bits)

    def mean(self, units: int, weight: int) -> float:
        """Return the weighted mean of the metric over clients.

        Args:
            units: the weighted sum of the clients' encoded values, in multiples of 2^-frac_bits.
            weight: the total weight W ≥ 1.
        """
        return float(Fraction(units, weight * 2**self.frac_bits))


@dataclass(frozen=True)
class MetricGrids:
    """The fixed-point encoding of all declared metrics as coordinates of the payload.

    The payload of a client with weight w holds w m for each encoded metric m. One more coordinate
    is 1 if the client clipped any metric. So the sum shows how many clients did.

    Attributes:
        grids: the encoding of each metric, in the order of the coordinates.
    """

    grids: tuple[MetricGrid, ...] = ()

    @classmethod
    def from_bounds(cls, bounds: Mapping[str, float], encoder: FixedPointEncoder) -> "MetricGrids":
        """Return the encodings of the declared metrics.

        Args:
            bounds: the clipping bound of each metric, by name.
            encoder: the encoder of the update.

        Raises:
            CapacityError: a metric's bound is too large for the encoder of the update.
        """
        return cls(
            tuple(MetricGrid.from_bound(name, bound, encoder) for name, bound in bounds.items())
        )

    @property
    def length(self) -> int:
        """Number of ring elements: one per metric, one that marks clipping; 0 without metrics."""
        return len(self.grids) + bool(self.grids)

    def encode(
        self, values: Mapping[str, float], weight: int, *, client: int | None = None
    ) -> list[int]:
        """Return a client's weighted and rounded metrics as `length` whole numbers for its payload.

        Args:
            values: the mean of each metric over the client's examples, by name.
            weight: the client's weight w.
            client: the client that error messages name.

        Raises:
            ValueError: the metrics are not exactly the declared ones.
            NonFiniteUpdateError: a metric is NaN or infinite.
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
        """Return the weighted mean of each metric, and the number of clients that clipped a metric.

        Args:
            sums: the sums of the clients' results of `encode`, `length` whole numbers.
            weight: the total weight W ≥ 1.
        """
        means = {
            grid.name: grid.mean(units, weight)
            for grid, units in zip(self.grids, sums, strict=False)
        }
        return means, sums[-1] if self.grids else 0


NO_METRICS = MetricGrids()
