"""Fixed-point encoding of floats in the ring Z_2^b, where sums are exact.

A value x is encoded as q = round(x 2^f) with f fraction bits, and multiplied by the client's weight
w in the ring, y = w q. Rounding comes before weighting, so the error of the mean depends on neither
the weights nor the number of clients.
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
from fedsim.secagg.settings import EncodingSettings

Ring = NDArray[np.unsignedinteger]

BLOCK_VALUES = 1 << 15  # 256 kB of float64, which stay in the cache between passes
MAX_FRAC_BITS = 32
_AUTO_MAX_WEIGHT = 100_000
_AUTO_VALUE_BOUND = 8.0  # far more than updates of usual models


@dataclass(frozen=True, kw_only=True)
class FixedPointEncoder:
    """A fixed-point encoder, which turns float arrays into ring elements and decodes their sums.

    Guarantee (P1): while at most `max_clients` vectors with weights w_k ≤ `max_weight` are added,
    no sum wraps. The decoded integers are exactly Σ w_k round(x_k 2^f), in any order.

    Guarantee (P2): |mean_i - Σ w_k x_ki / W| ≤ `max_abs_error` in each coordinate i, with W = Σ
    w_k.

    Attributes:
        ring_bits: number of bits b of a ring element, 32 or 64.
        frac_bits: number of fraction bits f ≥ 0 of an encoded value.
        value_bound: the largest size C > 0 of a value x.
        max_weight: the largest weight w_max ≥ 1 of a client.
        max_clients: the largest number n_max ≥ 1 of clients in a sum.
        guard_bits: the number g ≥ 0 of top bits that no honest sum reaches.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased).
        range_policy: what happens to values |x| > C: "error" raises, "clip" clips and counts.

    Raises:
        CapacityError: n_max w_max ⌈C 2^f⌉ > 2^(b-1-g) - 1, computed in integers.

    Example:
        >>> import numpy as np
        >>> from fedsim.secagg.encoding import FixedPointEncoder
        >>> encoder = FixedPointEncoder(frac_bits=16, value_bound=4.0, max_weight=1, max_clients=2)
        >>> uploads = np.zeros((2, 3), encoder.dtype)
        >>> _ = encoder.encode_into(uploads[0], np.array([1.0, -0.5, 0.25]), weight=1)
        >>> _ = encoder.encode_into(uploads[1], np.array([3.0, 0.5, 0.25]), weight=1)
        >>> encoder.decode(uploads.sum(axis=0), divisor=2).tolist()
        [2.0, 0.0, 0.25]
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
                f"{self.capacity.bit_length()}; {self._remedy()}"
            )

    @classmethod
    def from_settings(
        cls,
        settings: EncodingSettings,
        *,
        num_clients: int,
        weighted: bool,
        largest_update: float | None = None,
    ) -> Self:
        """Return the encoder of a federation.

        Args:
            settings: the section `encoding` of the settings; this function computes values that are
                `auto`.
            num_clients: the largest number of clients in one round.
            weighted: whether clients have different weights.
            largest_update: a bound on the size of every value in the planned uploads, used for
                `value_bound: auto`. None means that no bound is known; 8 is used instead.

        Raises:
            CapacityError: the largest sum does not fit into the ring, or `num_clients` is larger
                than the setting `max_clients`.
        """
        max_clients = num_clients if settings.max_clients == "auto" else settings.max_clients
        if num_clients > max_clients:
            raise CapacityError(
                f"a round has {num_clients} clients, but max_clients is {max_clients}; "
                "raise max_clients or ask fewer clients"
            )
        max_weight = settings.max_weight
        if max_weight == "auto":
            max_weight = _AUTO_MAX_WEIGHT if weighted else 1
        value_bound, frac_bits = settings.value_bound, settings.frac_bits
        if value_bound == "auto":
            value_bound = _AUTO_VALUE_BOUND if largest_update is None else largest_update
        if frac_bits == "auto":
            frac_bits = largest_frac_bits(
                ring_bits=settings.ring_bits,
                guard_bits=settings.guard_bits,
                units=max_clients * max_weight,
                value_bound=value_bound,
            )
        return cls(
            ring_bits=settings.ring_bits,
            frac_bits=max(frac_bits, 0),  # with -1 not even f = 0 fits: the constructor raises
            value_bound=value_bound,
            max_weight=max_weight,
            max_clients=max_clients,
            guard_bits=settings.guard_bits,
            rounding=settings.rounding,
            range_policy=settings.range_policy,
        )

    @property
    def dtype(self) -> np.dtype:
        """Unsigned dtype of ring elements."""
        return np.dtype(np.uint64 if self.ring_bits == 64 else np.uint32)

    @property
    def signed_dtype(self) -> np.dtype:
        """Signed dtype of the same width, with which a sum reads as a signed integer."""
        return np.dtype(np.int64 if self.ring_bits == 64 else np.int32)

    @property
    def capacity(self) -> int:
        """Largest |sum| that the encoding allows, 2^(ring_bits - 1 - guard_bits) - 1."""
        return _ring_capacity(self.ring_bits, self.guard_bits)

    @property
    def max_value(self) -> int:
        """Largest size of an encoded value before weighting, ⌈value_bound · 2^frac_bits⌉."""
        return _scaled_bound(self.value_bound, self.frac_bits)

    @property
    def max_contribution(self) -> int:
        """Largest size of what one client adds to a coordinate, `max_weight` · `max_value`."""
        return self.max_weight * self.max_value

    @property
    def max_total(self) -> int:
        """Largest |sum| of honest clients in a coordinate, `max_clients` · `max_contribution`."""
        return self.max_clients * self.max_contribution

    @property
    def max_abs_error(self) -> float:
        """Upper bound on the error of a decoded mean, |decoded - exact|, in each coordinate.

        The bound is that of guarantee (P2) of the class, rounded up. It covers the
        rounding of values (half a step of 2^-f for "nearest", a whole step for "stochastic"), and
        the float64 rounding in encoding and decoding.
        """
        exponent = self.frac_bits + (self.rounding == "nearest")
        return math.nextafter(2.0**-exponent + self.value_bound * 2.0**-51, math.inf)

    def check_weight(self, weight: int, *, client: int | None = None) -> int:
        """Return a client's weight as an int after checking its range.

        Args:
            weight: the client's weight w.
            client: the client that error messages name.

        Raises:
            InvalidWeightError: the weight is not a whole number from 1 to `max_weight`.
        """
        whole = isinstance(weight, (int, np.integer)) and not isinstance(weight, bool)
        if not whole or not 1 <= weight <= self.max_weight:
            raise InvalidWeightError(
                f"the weight must be a whole number from 1 to {self.max_weight}, got {weight!r}; "
                "raise max_weight, or weight uniformly",
                client=client,
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
        """Write weight · round((values - minus) 2^frac_bits); return the number of clipped values.

        Args:
            out: the ring elements (n,) to overwrite with the result.
            values: numbers of any dtype (n,).
            weight: the client's weight, already checked.
            minus: numbers (n,) to subtract in float64; None subtracts nothing.
            name: the name of the values in error messages.
            rng: the generator of stochastic rounding; unused when rounding to nearest.

        Raises:
            ValueError: rounding is stochastic and `rng` is None.
            NonFiniteUpdateError: a value is NaN or infinite.
            ValueOutOfRangeError: a value exceeds `value_bound`, and `range_policy` is "error".
        """
        if self.rounding == "stochastic" and rng is None:
            raise ValueError("stochastic rounding needs a generator of its own, got rng=None")
        signed = out.view(self.signed_dtype)
        buffer = np.empty(min(BLOCK_VALUES, len(values)))
        clipped = 0
        for start in range(0, len(values), BLOCK_VALUES):
            stop = min(start + BLOCK_VALUES, len(values))
            block = buffer[: stop - start]
            if minus is None:
                block[:] = values[start:stop]
            else:
                np.subtract(values[start:stop], minus[start:stop], out=block, dtype=np.float64)
            clipped += self._clip_or_raise(block, name)
            np.multiply(block, 2.0**self.frac_bits, out=block)
            self._round(block, rng)
            np.copyto(signed[start:stop], block, casting="unsafe")  # already whole and in range
            if weight != 1:
                signed[start:stop] *= weight
        return clipped

    def decode(self, total: Ring, divisor: int) -> NDArray[np.float64]:
        """Return each coordinate's weighted mean, total / (divisor · 2^frac_bits), float64 (n,).

        Args:
            total: the sums of encoded values, ring elements (n,).
            divisor: the total weight, ≥ 1.
        """
        return total.view(self.signed_dtype) / (divisor * 2.0**self.frac_bits)

    def in_range(self, total: Ring) -> bool:
        """Whether `max_clients` honest clients can produce every value in the sum `total`."""
        if not len(total):
            return True
        lifted = total.view(self.signed_dtype)
        return -self.max_total <= int(lifted.min()) and int(lifted.max()) <= self.max_total

    def _clip_or_raise(self, block: NDArray[np.float64], name: str) -> int:
        bound = self.value_bound
        if -bound <= block.min() and block.max() <= bound:  # both are NaN when any value is
            return 0
        bad = int(len(block) - np.isfinite(block).sum())
        if bad:
            raise NonFiniteUpdateError(
                f"{name!r} has {bad} NaN or infinite values; lower the learning rate or clip",
                tensor=name,
            )
        if self.range_policy == "error":
            largest = float(np.abs(block).max())
            raise ValueOutOfRangeError(
                f"{name!r} has |value| {largest:.6g}, above value_bound {bound}; raise "
                "value_bound, or set range_policy: clip",
                tensor=name,
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
        # The fraction is exact in float64; the value plus a uniform number would not be.
        up = rng.random(len(block)) < np.subtract(block, below, out=block)
        np.add(below, up, out=block)

    def _remedy(self) -> str:
        room = {
            "ring_bits": self.ring_bits,
            "guard_bits": self.guard_bits,
            "units": self.max_clients * self.max_weight,
            "value_bound": self.value_bound,
        }
        frac_bits = largest_frac_bits(**room)
        if frac_bits >= 0:
            return f"use frac_bits {frac_bits} or less, or auto"
        if self.ring_bits == 32 and largest_frac_bits(**{**room, "ring_bits": 64}) >= 0:
            return "use ring_bits: 64"
        return "lower max_clients, max_weight, value_bound or guard_bits"


def largest_frac_bits(*, ring_bits: int, guard_bits: int, units: int, value_bound: float) -> int:
    """Return the largest number of fraction bits, at most 32, for which every sum fits the ring.

    The result is the largest f with units ⌈C 2^f⌉ ≤ 2^(b-1-g) - 1, or -1 if none exists.

    Args:
        ring_bits: number of bits b of a ring element.
        guard_bits: number g of unused top bits.
        units: the largest total weight of a sum, n_max w_max.
        value_bound: the largest |value| C.

    Example:
        >>> from fedsim.secagg.encoding import largest_frac_bits
        >>> largest_frac_bits(ring_bits=32, guard_bits=8, units=100, value_bound=8.0)
        13
    """
    for frac_bits in range(MAX_FRAC_BITS, -1, -1):
        if units * _scaled_bound(value_bound, frac_bits) <= _ring_capacity(ring_bits, guard_bits):
            return frac_bits
    return -1


def _ring_capacity(ring_bits: int, guard_bits: int) -> int:
    return (1 << max(ring_bits - 1 - guard_bits, 0)) - 1


def _scaled_bound(value_bound: float, frac_bits: int) -> int:
    return math.ceil(Fraction(value_bound) * 2**frac_bits)
