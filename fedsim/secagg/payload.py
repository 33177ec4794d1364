"""The payload of secure aggregation: a client's upload as one vector.

The payload holds the update, the declared metrics, the weight, and the number 1. The layout of the
model says which slice of the vector holds which tensor.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import MAX_PARAMETERS
from fedsim.secagg.encoding import FixedPointEncoder, Ring
from fedsim.secagg.errors import (
    CapacityError,
    LayoutMismatchError,
    ShareMismatchError,
    ZeroWeightError,
)
from fedsim.secagg.metrics import NO_METRICS, MetricGrids

NamedArrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class TensorSpec:
    """Name of a tensor, its shape, and the name of its dtype ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values in the tensor; 1 for a scalar."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class TensorLayout:
    """The names, shapes, dtypes and order of the tensors of a model.

    Guarantee: `check` accepts only arrays with exactly this layout; nothing is broadcast, reordered
    or cast. Byte order and strides do not matter, as they do not change a number's value.
    """

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def from_arrays(cls, arrays: NamedArrays) -> Self:
        """Return the layout of the given named arrays.

        Raises:
            LayoutMismatchError: a dtype is neither float nor integer nor boolean.
        """
        for name, value in arrays.items():
            if value.dtype.kind not in "fiub":
                raise LayoutMismatchError(
                    f"array {name!r} has the type {value.dtype}, which has no sum; "
                    "only floats, integers and booleans can be aggregated"
                )
        return cls(
            tuple(
                TensorSpec(name, tuple(value.shape), value.dtype.name)
                for name, value in arrays.items()
            )
        )

    @cached_property
    def size(self) -> int:
        """Number of coordinates d of all tensors together."""
        return sum(spec.size for spec in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, shapes, dtypes and order, in hex."""
        fields = [[spec.name, list(spec.shape), spec.dtype] for spec in self.tensors]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def check(self, arrays: NamedArrays, *, client: int | None = None) -> None:
        """Check that arrays have this layout.

        Args:
            arrays: the arrays by name.
            client: the client that error messages name.

        Raises:
            LayoutMismatchError: the layout differs; the message names the first different tensor.
        """
        got = TensorLayout.from_arrays(arrays)
        if got == self:
            return
        pairs = zip_longest(self.tensors, got.tensors, fillvalue="nothing")
        expected, actual = next(pair for pair in pairs if pair[0] != pair[1])
        raise LayoutMismatchError(
            f"the arrays differ from the announced layout: expected {expected}, got {actual}; "
            "all parties must build the same model",
            client=client,
        )

    def slices(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield each tensor's specification with the slice of the flat vector that holds it."""
        start = 0
        for spec in self.tensors:
            yield spec, slice(start, start + spec.size)
            start += spec.size

    def unflatten(
        self, vector: NDArray[np.float64], *, plus: NamedArrays | None = None
    ) -> dict[str, NDArray]:
        """Return the tensors that a flat vector holds, cast to their dtypes; integers are rounded.

        Args:
            vector: the flat vector, float64 (d,).
            plus: tensors of this layout to add in float64 before the cast; None adds nothing.

        Raises:
            LayoutMismatchError: the vector does not have d values, or `plus` has another layout.
        """
        if vector.shape != (self.size,):
            raise LayoutMismatchError(
                f"the vector must have {self.size} values, got shape {vector.shape}"
            )
        if plus is not None:
            self.check(plus)
        result: dict[str, NDArray] = {}
        for spec, where in self.slices():
            value = vector[where].reshape(spec.shape)
            if plus is not None:
                value = value + plus[spec.name].astype(np.float64)
            whole = np.dtype(spec.dtype).kind != "f"
            result[spec.name] = (np.rint(value) if whole else value).astype(spec.dtype)
        return result


MAX_LENGTH = MAX_PARAMETERS + 1000
"""Largest number of ring elements of a payload: those of the largest built-in model and 1,000 more.

A helper does not know the model, so it refuses any longer vector.
"""


@dataclass(frozen=True)
class DecodedSum:
    """The decoded sum of a round.

    Attributes:
        arrays: the arrays of the next model by name, or the sums if clients send integer
            contributions.
        weight: the total weight of the clients in the sum.
        num_clients: the number of clients in the sum.
        metrics: the weighted mean of each declared metric, by name.
        clipped: the number of coordinates that clients clipped; 0 if values out of range are
            errors.
        clipped_metrics: the number of clients that clipped a metric to its bound.
    """

    arrays: dict[str, NDArray]
    weight: int
    num_clients: int
    metrics: dict[str, float]
    clipped: int
    clipped_metrics: int = 0


@dataclass(frozen=True)
class PayloadCodec:
    """Encoder of clients' updates as payload vectors, and decoder of sums of such vectors.

    A payload is [w q_1 … w q_d, w m_1 … w m_j, (clips), w, 1] with values q, metrics m and weight
    w; (clips) is the number of clipped values, present only if the encoder clips. Weight and 1 are
    summed too, so the sum hides the size of a single client and shows the number of summed clients.
    Metrics are means over a client's examples, clipped and weighted like the client's update.

    Attributes:
        encoder: the fixed-point encoder of the update.
        layout: the layout of the model.
        metrics: the encoding of the declared metrics.
        is_integers: whether tensors are int64 contributions to a noisy sum, which are decoded to
            their sum. No reference model is subtracted, and every client has the weight 1.

    Raises:
        CapacityError: a payload has more than `MAX_LENGTH` ring elements, which every helper would
            refuse.
    """

    encoder: FixedPointEncoder
    layout: TensorLayout
    metrics: MetricGrids = NO_METRICS
    is_integers: bool = False

    def __post_init__(self) -> None:
        if self.length > MAX_LENGTH:
            raise CapacityError(
                f"an upload of {self.length:,} values is above the {MAX_LENGTH:,} of secure "
                "aggregation; train fewer parameters"
            )

    @classmethod
    def of_integers(
        cls, shapes: Mapping[str, tuple[int, ...]], *, bound: int, num_clients: int
    ) -> Self:
        """Return the codec for integer contributions to a noisy sum, in the ring Z_2^64.

        Args:
            shapes: the shape of each tensor, by name.
            bound: the largest |integer| of a client. A sum beyond `num_clients` times the bound
                aborts the round.
            num_clients: the largest number of clients in one round.

        Raises:
            CapacityError: the largest sum does not fit into the ring.
        """
        encoder = FixedPointEncoder(
            ring_bits=64,
            frac_bits=0,
            value_bound=float(bound),
            max_weight=1,
            max_clients=num_clients,
        )
        tensors = (TensorSpec(name, shape, "int64") for name, shape in shapes.items())
        return cls(encoder, TensorLayout(tuple(tensors)), is_integers=True)

    @property
    def length(self) -> int:
        """Number of ring elements of a payload.

        These are the model's coordinates, the metrics, the number of clips if counted, the weight
        and the 1.
        """
        return self._body.stop + 2

    def check_vector(self, vector: Ring, *, round_number: int, client: int | None = None) -> None:
        """Check that a received vector has the dtype and the length of a payload.

        Args:
            vector: the received array.
            round_number: the round that error messages name.
            client: the client that error messages name; None if no client sent the vector.

        Raises:
            LayoutMismatchError: dtype or length differ.
        """
        if vector.dtype != self.encoder.dtype or vector.shape != (self.length,):
            raise LayoutMismatchError(
                f"expected {self.encoder.dtype}[{self.length}], got "
                f"{vector.dtype}{list(vector.shape)}; all parties must use the same settings and "
                "model",
                round_number=round_number,
                client=client,
            )

    def encode(
        self,
        arrays: NamedArrays,
        *,
        reference: NamedArrays | None,
        weight: int,
        metrics: Mapping[str, float] | None = None,
        rng: np.random.Generator | None = None,
        client: int | None = None,
    ) -> Ring:
        """Return the payload of one client, ring elements (`length`,).

        Args:
            arrays: the trained model, arrays by name.
            reference: the model of the request, subtracted in float64; None subtracts nothing.
            weight: the client's weight w, a whole number from 1 to the encoder's `max_weight`.
            metrics: the mean of each declared metric over the client's examples, by name.
            rng: the generator of stochastic rounding.
            client: the client that error messages name.

        Raises:
            LayoutMismatchError: names, shapes, dtypes or order differ from the layout.
            NonFiniteUpdateError, ValueOutOfRangeError, InvalidWeightError: see `FixedPointEncoder`.
        """
        weight = self.encoder.check_weight(weight, client=client)
        self.layout.check(arrays, client=client)
        if reference is not None:
            self.layout.check(reference, client=client)
        out = np.empty(self.length, self.encoder.dtype)
        clipped = 0
        for spec, where in self.layout.slices():
            clipped += self.encoder.encode_into(
                out[where],
                arrays[spec.name].reshape(-1),
                weight,
                minus=None if reference is None else reference[spec.name].reshape(-1),
                name=spec.name,
                rng=rng,
            )
        tail = self.metrics.encode(metrics or {}, weight, client=client)
        if self._counts_clips:
            tail.append(
                min(clipped, self.encoder.max_contribution)
            )  # one client's room in the ring
        out[self.layout.size :].view(self.encoder.signed_dtype)[:] = [*tail, weight, 1]
        return out

    def decode(self, total: Ring, *, num_clients: int, reference: NamedArrays | None) -> DecodedSum:
        """Return the decoded sum of `num_clients` payloads, after checking its range.

        Guarantee (P3): a wrong or missing mask or share passes the check with probability at most
        2^-b, times 2^-g for each further coordinate, with b ring bits and g guard bits of the
        encoder. The checksums of `digests` find damage inside the range.

        Args:
            total: the sum of payloads, ring elements (`length`,).
            num_clients: the number of payloads in the sum.
            reference: the model of the requests, added to the mean; None adds nothing.

        Raises:
            ShareMismatchError: the sum cannot be that of `num_clients` honest payloads.
            ZeroWeightError: the weights add up to 0.
        """
        if total.shape != (self.length,) or total.dtype != self.encoder.dtype:
            raise ShareMismatchError(
                f"the sum must be {self.encoder.dtype}[{self.length}], "
                f"got {total.dtype}{list(total.shape)}"
            )
        lifted = total.view(self.encoder.signed_dtype)
        weight, count = int(lifted[-2]), int(lifted[-1])
        self._check(total, weight, count, num_clients)
        sums = lifted[self.layout.size : -2].tolist()
        means, clipped_metrics = self.metrics.decode(sums[: self.metrics.length], weight)
        if self.is_integers:
            arrays = {
                spec.name: lifted[where].reshape(spec.shape) for spec, where in self.layout.slices()
            }
        else:
            mean = self.encoder.decode(total[: self.layout.size], weight)
            arrays = self.layout.unflatten(mean, plus=reference)
        return DecodedSum(
            arrays=arrays,
            weight=weight,
            num_clients=count,
            metrics=means,
            clipped=sums[-1] if self._counts_clips else 0,
            clipped_metrics=clipped_metrics,
        )

    @property
    def _counts_clips(self) -> bool:
        return self.encoder.range_policy == "clip"

    @property
    def _body(self) -> slice:
        return slice(0, self.layout.size + self.metrics.length + self._counts_clips)

    def _check(self, total: Ring, weight: int, count: int, num_clients: int) -> None:
        if count != num_clients:
            raise ShareMismatchError(
                f"the shares sum up {count} clients, but {num_clients} took part; "
                "a share is missing, doubled or of another round"
            )
        if weight == 0:
            raise ZeroWeightError("the weights of the round add up to 0; there is no mean")
        max_weight = num_clients * self.encoder.max_weight
        if not 0 < weight <= max_weight:
            raise ShareMismatchError(
                f"the total weight is {weight}, but {num_clients} clients weigh from 1 to "
                f"{max_weight}; the shares do not belong together"
            )
        if not self.encoder.in_range(total[self._body]):
            raise ShareMismatchError(
                "a sum is larger than honest clients can make it; "
                "the shares do not belong together or were damaged"
            )
