"""Fixed point in the ring Z_2^b: floats become integers whose sum is exact.

A value x is stored as q = round(x 2^f) and weighted in the ring, y = w q. Rounding comes before
weighting, so that the error of the mean depends neither on the weights nor on their number.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedsim.secagg.errors import (
    CapacityError,
    InvalidWeightError,
    NonFiniteUpdateError,
    ValueOutOfRangeError,
)
from fedsim.secagg.settings import SecureAggregationSettings

Ring = NDArray[np.unsignedinteger]

BLOCK = 1 << 15  # float64 values of a block: 256 kB, which stays in the cache between passes
MOST_FRAC_BITS = 32
_EXAMPLES_MAX_WEIGHT = 100_000


@dataclass(frozen=True, kw_only=True)
class FixedPointEncoder:
    """Encodes float arrays as ring elements, and decodes sums of them.

    Guarantee (P1): while at most `max_clients` vectors with weights ≤ `max_weight` are added, no
    sum wraps, and the decoded integers are exactly Σ w_k round(x_k 2^f), in any order.
    Guarantee (P2): |mean_i - Σ w_k x_ki / W| ≤ `max_abs_error`.

    Attributes:
        ring_bits: b, 32 or 64.
        frac_bits: f ≥ 0.
        value_bound: C > 0, the largest |x|.
        max_weight: w_max ≥ 1.
        max_clients: n_max ≥ 1.
        guard_bits: g ≥ 0, top bits that no honest sum reaches.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased).
        range_policy: "error" or "clip", for |x| > C.

    Raises:
        CapacityError: n_max w_max ⌈C 2^f⌉ > 2^(b-1-g) - 1, computed in integers.
    """

    ring_bits: int = 64
    frac_bits: int
    value_bound: float
    max_weight: int
    max_clients: int
    guard_bits: int = 8
    rounding: Literal["nearest", "stochastic"] = "nearest"
    range_policy: Literal["error", "clip"] = "error"

    def __post_init__(self) -> None:
        if self.max_total > self.capacity:
            raise CapacityError(
                f"{self.max_clients} clients x weight {self.max_weight} x bound {self.value_bound}"
                f" at frac_bits {self.frac_bits} need {self.max_total.bit_length()} bits, but a "
                f"{self.ring_bits}-bit ring with {self.guard_bits} guard bits holds "
                f"{self.capacity.bit_length()}; {self._way_out()}"
            )

    @classmethod
    def from_settings(
        cls, settings: SecureAggregationSettings, *, clients: int, weighted: bool
    ) -> Self:
        """Return the encoder of a federation.

        Args:
            settings: what was asked for; `auto` values are computed here.
            clients: most clients that take part in one round.
            weighted: whether clients weigh by their examples.

        Raises:
            CapacityError: the largest sum does not fit, or more clients than `max_clients`.
        """
        most = clients if settings.max_clients == "auto" else settings.max_clients
        if clients > most:
            raise CapacityError(
                f"a round has {clients} clients, but max_clients is {most}; "
                "raise max_clients or ask fewer clients"
            )
        heaviest = settings.max_weight
        if heaviest == "auto":
            heaviest = _EXAMPLES_MAX_WEIGHT if weighted else 1
        places = settings.frac_bits
        if places == "auto":
            places = largest_frac_bits(
                ring_bits=settings.ring_bits,
                guard_bits=settings.guard_bits,
                units=most * heaviest,
                value_bound=settings.value_bound,
            )
        return cls(
            ring_bits=settings.ring_bits,
            frac_bits=max(places, 0),  # -1: not even f = 0 fits, which the constructor explains
            value_bound=settings.value_bound,
            max_weight=heaviest,
            max_clients=most,
            guard_bits=settings.guard_bits,
            rounding=settings.rounding,
            range_policy=settings.range_policy,
        )

    @property
    def dtype(self) -> np.dtype:
        """The unsigned type of ring elements."""
        return np.dtype(np.uint64 if self.ring_bits == 64 else np.uint32)

    @property
    def signed(self) -> np.dtype:
        """The signed type of the same width: viewing a sum as this is the centred lift."""
        return np.dtype(np.int64 if self.ring_bits == 64 else np.int32)

    @property
    def capacity(self) -> int:
        """The largest |sum| that leaves the guard bits alone: 2^(b-1-g) - 1."""
        return _capacity(self.ring_bits, self.guard_bits)

    @property
    def max_value(self) -> int:
        """⌈C 2^f⌉, the largest |q| of one coordinate."""
        return _scaled_bound(self.value_bound, self.frac_bits)

    @property
    def max_share(self) -> int:
        """w_max ⌈C 2^f⌉, the largest |y| that one client contributes to a coordinate."""
        return self.max_weight * self.max_value

    @property
    def max_total(self) -> int:
        """n_max w_max ⌈C 2^f⌉, the largest |sum| of honest clients."""
        return self.max_clients * self.max_share

    @property
    def max_abs_error(self) -> float:
        """The bound P2 on |mean - exact mean|, rounded up; stochastic rounding doubles its half.

        The first term is rounding to the grid, the second float64 in encode and decode.
        """
        places = self.frac_bits + (self.rounding == "nearest")
        return math.nextafter(2.0**-places + self.value_bound * 2.0**-51, math.inf)

    def check_weight(self, weight: int, *, client: int | None = None) -> int:
        """Return the weight, or say why it cannot be used.

        Raises:
            InvalidWeightError: not a whole number from 1 to `max_weight`.
        """
        whole = isinstance(weight, (int, np.integer)) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= self.max_weight:
            raise InvalidWeightError(
                f"the weight must be a whole number from 1 to {self.max_weight}, got {weight!r}; "
                "raise max_weight, or weight uniformly",
                client=client,
                weight=weight,
            )
        return int(weight)

    def encode_into(
        self,
        out: Ring,
        values: NDArray,
        weight: int,
        *,
        minus: NDArray | None = None,
        name: str = "values",
        rng: np.random.Generator | None = None,
    ) -> int:
        """Write w round((values - minus) 2^f) into `out`; return how many values were clipped.

        Args:
            out: ring elements, one for each value, one-dimensional.
            values: numbers of any type, one-dimensional.
            weight: w, checked before.
            minus: subtracted in float64; None for nothing.
            name: what errors call the values.
            rng: the stream of stochastic rounding; not read when rounding to nearest.

        Raises:
            NonFiniteUpdateError: NaN or infinite values.
            ValueOutOfRangeError: |x| > C under the policy "error".
        """
        if self.rounding == "stochastic" and rng is None:
            raise ValueError("stochastic rounding needs a generator of its own, got rng=None")
        signed = out.view(self.signed)
        buffer = np.empty(min(BLOCK, len(values)))
        clipped = 0
        for start in range(0, len(values), BLOCK):
            stop = min(start + BLOCK, len(values))
            block = buffer[: stop - start]
            if minus is None:
                block[:] = values[start:stop]
            else:
                np.subtract(values[start:stop], minus[start:stop], out=block, dtype=np.float64)
            clipped += self._into_range(block, name)
            np.multiply(block, 2.0**self.frac_bits, out=block)
            self._round(block, rng)
            np.copyto(signed[start:stop], block, casting="unsafe")  # whole and in range by now
            if weight != 1:
                signed[start:stop] *= weight
        return clipped

    def decode(self, total: Ring, divisor: int) -> NDArray[np.float64]:
        """Return the sums over `divisor` 2^f, in float64.

        Args:
            total: sums of encoded values.
            divisor: the total weight ≥ 1.
        """
        return total.view(self.signed) / (divisor * 2.0**self.frac_bits)

    def in_range(self, total: Ring) -> bool:
        """Return whether every sum is one that `max_clients` honest clients can have made."""
        if not len(total):
            return True
        lifted = total.view(self.signed)
        return -self.max_total <= int(lifted.min()) and int(lifted.max()) <= self.max_total

    def _into_range(self, block: NDArray[np.float64], name: str) -> int:
        bound = self.value_bound
        if -bound <= block.min() and block.max() <= bound:  # both are NaN when any value is
            return 0
        bad = int(len(block) - np.isfinite(block).sum())
        if bad:
            raise NonFiniteUpdateError(
                f"{name!r} has {bad} NaN or infinite values; lower the learning rate or clip",
                tensor=name,
                count=bad,
            )
        if self.range_policy == "error":
            largest = float(np.abs(block).max())
            raise ValueOutOfRangeError(
                f"{name!r} has |value| {largest:.6g}, above value_bound {bound}; raise "
                "value_bound, or say range_policy: clip",
                tensor=name,
                largest=largest,
                bound=bound,
            )
        outside = int((np.abs(block) > bound).sum())
        np.clip(block, -bound, bound, out=block)
        return outside

    def _round(self, block: NDArray[np.float64], rng: np.random.Generator | None) -> None:
        if self.rounding == "nearest" or rng is None:
            np.rint(block, out=block)
            return
        below = np.floor(block)
        # The fraction is exact in float64; adding the uniform number to the value would not be.
        up = rng.random(len(block)) < np.subtract(block, below, out=block)
        np.add(below, up, out=block)

    def _way_out(self) -> str:
        room = {
            "ring_bits": self.ring_bits,
            "guard_bits": self.guard_bits,
            "units": self.max_clients * self.max_weight,
            "value_bound": self.value_bound,
        }
        places = largest_frac_bits(**room)
        if places >= 0:
            return f"use frac_bits {places} or less, or auto"
        if self.ring_bits == 32 and largest_frac_bits(**{**room, "ring_bits": 64}) >= 0:
            return "use ring_bits: 64"
        return "lower max_clients, max_weight, value_bound or guard_bits"


def largest_frac_bits(*, ring_bits: int, guard_bits: int, units: int, value_bound: float) -> int:
    """Return the largest f ≤ 32 with units ⌈C 2^f⌉ ≤ 2^(b-1-g) - 1, or -1 where none exists.

    Args:
        ring_bits: b.
        guard_bits: g.
        units: n_max w_max.
        value_bound: C.
    """
    for places in range(MOST_FRAC_BITS, -1, -1):
        if units * _scaled_bound(value_bound, places) <= _capacity(ring_bits, guard_bits):
            return places
    return -1


def _capacity(ring_bits: int, guard_bits: int) -> int:
    return (1 << max(ring_bits - 1 - guard_bits, 0)) - 1


def _scaled_bound(value_bound: float, frac_bits: int) -> int:
    return math.ceil(Fraction(value_bound) * 2**frac_bits)
