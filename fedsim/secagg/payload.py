"""What a client uploads as one vector: its update, its declared metrics, its weight, and a one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.secagg.encoding import FixedPointEncoder, Ring
from fedsim.secagg.errors import ShareMismatchError, ZeroWeightError
from fedsim.secagg.layout import Arrays, TensorLayout
from fedsim.secagg.metrics import NO_METRICS, MetricGrids


@dataclass(frozen=True)
class Aggregate:
    """What the sum of a round says.

    Attributes:
        arrays: the next model.
        weight: total weight W.
        clients: number of summed clients.
        metrics: weighted means of the declared metrics.
        clipped: coordinates that clients clipped; 0 under the policy "error".
        clipped_metrics: clients that clipped a metric to its bound.
    """

    arrays: dict[str, NDArray]
    weight: int
    clients: int
    metrics: dict[str, float]
    clipped: int
    clipped_metrics: int = 0


@dataclass(frozen=True)
class PayloadCodec:
    """Builds [w q_1 … w q_d, w m_1 … w m_j, (clips), w, 1] and reads the sum of such vectors.

    The weight and the constant are part of the sum, so that nobody learns a single client's size
    and everybody sees how many clients were summed. Metrics are means over a client's examples,
    clipped and weighted like its update.

    Attributes:
        encoder: fixed-point numbers.
        layout: the model.
        metrics: the declared metrics.
    """

    encoder: FixedPointEncoder
    layout: TensorLayout
    metrics: MetricGrids = NO_METRICS

    @property
    def length(self) -> int:
        """Ring elements of a payload: d + 2, the metrics, and one when clips are counted."""
        return self._body.stop + 2

    def encode(
        self,
        arrays: Arrays,
        *,
        reference: Arrays | None,
        weight: int,
        metrics: Mapping[str, float] | None = None,
        rng: np.random.Generator | None = None,
        client: int | None = None,
    ) -> Ring:
        """Return the payload of one client.

        Args:
            arrays: the trained model.
            reference: the model of the request, subtracted in float64; None to send `arrays`.
            weight: w, a whole number from 1 to w_max.
            metrics: a mean over the client's examples for each declared metric.
            rng: the stream of stochastic rounding.
            client: named in errors.

        Raises:
            LayoutMismatchError: wrong names, shapes, types or order.
            NonFiniteUpdateError, ValueOutOfRangeError, InvalidWeightError: see the encoder.
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
            tail.append(min(clipped, self.encoder.max_share))  # one client's room in the ring
        out[self.layout.size :].view(self.encoder.signed)[:] = [*tail, weight, 1]
        return out

    def decode(self, total: Ring, *, clients: int, reference: Arrays | None) -> Aggregate:
        """Return what the sum of `clients` payloads says.

        Guarantee (P3): a wrong or missing mask or share passes with probability at most 2^-b, and
        2^-g for each further coordinate; damage inside the admissible range is for the digests.

        Raises:
            ShareMismatchError: the sum cannot be that of `clients` honest payloads.
            ZeroWeightError: the weights add up to nothing.
        """
        if total.shape != (self.length,) or total.dtype != self.encoder.dtype:
            raise ShareMismatchError(
                f"the sum must be {self.encoder.dtype}[{self.length}], "
                f"got {total.dtype}{list(total.shape)}"
            )
        lifted = total.view(self.encoder.signed)
        weight, count = int(lifted[-2]), int(lifted[-1])
        self._check(total, weight, count, clients)
        mean = self.encoder.decode(total[: self.layout.size], weight)
        sums = lifted[self.layout.size : -2].tolist()
        means, clipped_metrics = self.metrics.decode(sums[: self.metrics.length], weight)
        return Aggregate(
            arrays=self.layout.unflatten(mean, plus=reference),
            weight=weight,
            clients=count,
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

    def _check(self, total: Ring, weight: int, count: int, clients: int) -> None:
        if count != clients:
            raise ShareMismatchError(
                f"the shares sum up {count} clients, but {clients} took part; "
                "a share is missing, doubled or of another round",
                count=count,
                clients=clients,
            )
        if weight == 0:
            raise ZeroWeightError("the weights of the round add up to 0; there is no mean")
        if not 0 < weight <= clients * self.encoder.max_weight:
            raise ShareMismatchError(
                f"the total weight is {weight}, but {clients} clients weigh from 1 to "
                f"{clients * self.encoder.max_weight}; the shares do not belong together"
            )
        if not self.encoder.in_range(total[self._body]):
            raise ShareMismatchError(
                "a sum is larger than honest clients can make it; "
                "the shares do not belong together or were damaged"
            )
