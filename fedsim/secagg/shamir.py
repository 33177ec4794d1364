"""Shamir secret sharing of 32-byte secrets, over the prime field of 2^256 + 297 elements."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fedsim.secagg.errors import ShareMismatchError, ThresholdError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


@dataclass(frozen=True)
class ShamirSharing:
    """Shamir secret sharing, in which any `threshold` shares recover the secret.

    Guarantee: the coefficients are uniform in the field and come from the operating system's
    randomness. So fewer shares than `threshold` are independent of the secret.

    Source: Shamir 1979, "How to share a secret".

    Attributes:
        threshold: the number of shares that recover a secret, ≥ 1.
    """

    threshold: int

    def split(self, secret: bytes, points: Sequence[int]) -> list[bytes]:
        """Return the shares of a secret, one share of 33 bytes for each point.

        Args:
            secret: the secret, 32 bytes.
            points: distinct whole numbers from 1 to `PRIME` - 1, at least `threshold` of them.

        Raises:
            ThresholdError: there are fewer points than the threshold, so the secret could not be
                recovered.
            ValueError: the secret does not have 32 bytes, a point repeats, or a point is out of
                range.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret must have {SECRET_BYTES} bytes, got {len(secret)}")
        if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
            raise ValueError(f"points must be distinct and from 1 to the prime, got {list(points)}")
        if not 1 <= self.threshold <= len(points):
            raise ThresholdError("too few holders", have=len(points), need=self.threshold)
        coefficients = [secrets.randbelow(PRIME) for _ in range(self.threshold - 1)]
        constant = int.from_bytes(secret, "big")
        return [
            _evaluate(coefficients, constant, point).to_bytes(SHARE_BYTES, "big")
            for point in points
        ]

    def combine(self, shares: Mapping[int, bytes]) -> bytes:
        """Return the secret that has the given shares, each keyed by its evaluation point.

        Of more shares than needed, those with the smallest points are used. So all secrets whose
        shares are at the same points need the Lagrange coefficients only once.

        Raises:
            ThresholdError: there are fewer than `threshold` shares.
            ShareMismatchError: the shares do not belong to a 32-byte secret.
        """
        if len(shares) < self.threshold:
            raise ThresholdError("too few shares", have=len(shares), need=self.threshold)
        points = tuple(sorted(shares)[: self.threshold])
        coefficients = _lagrange_at_zero(points)
        value = sum(
            coefficient * int.from_bytes(shares[point], "big")
            for coefficient, point in zip(coefficients, points, strict=True)
        )
        secret = value % PRIME
        if secret >= 2**256:
            raise ShareMismatchError("the shares belong to no secret; one of them was damaged")
        return secret.to_bytes(SECRET_BYTES, "big")


def _evaluate(coefficients: Sequence[int], constant: int, point: int) -> int:
    value = 0
    for coefficient in coefficients:
        value = (value + coefficient) * point % PRIME
    return (value + constant) % PRIME


@lru_cache(maxsize=256)
def _lagrange_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange coefficients of the points at 0."""
    coefficients = []
    for point in points:
        numerator, denominator = 1, 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        coefficients.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(coefficients)
