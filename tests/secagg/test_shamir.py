"""Secret sharing: any t shares recover the secret, t - 1 are independent of it."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.secagg import shamir
from fedsim.secagg.errors import ShareMismatchError, ThresholdError
from fedsim.secagg.shamir import PRIME, SHARE_BYTES, ShamirSharing


def test_the_modulus_is_prime_and_holds_every_secret() -> None:
    assert PRIME > 2**256
    for witness in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller-Rabin
        odd, twos = PRIME - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        power = pow(witness, odd, PRIME)
        assert power in (1, PRIME - 1) or any(
            pow(power, 2**k, PRIME) == PRIME - 1 for k in range(twos)
        )


@given(
    secret=st.one_of(
        st.binary(min_size=32, max_size=32), st.sampled_from([bytes(32), b"\xff" * 32])
    ),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_threshold_of_shares_recovers(secret: bytes, data: Any) -> None:
    points = data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    shares = dict(zip(points, ShamirSharing(threshold).split(secret, points), strict=True))
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    some = data.draw(st.permutations(points))[: data.draw(st.integers(threshold, len(points)))]
    assert ShamirSharing(threshold).combine({point: shares[point] for point in some}) == secret
    with pytest.raises(ThresholdError, match="too few shares"):
        ShamirSharing(threshold).combine({point: shares[point] for point in some[: threshold - 1]})


def test_fewer_shares_are_uniform_for_every_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof by enumeration over the field of 7: threshold 3, every pair of 3 points."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    for pair in ((1, 2), (1, 3), (2, 3)):
        seen = []
        for secret in range(7):
            views: Counter[tuple[int, ...]] = Counter()
            for coefficients in product(range(7), repeat=2):
                views[tuple(shamir._evaluate(coefficients, secret, x) for x in pair)] += 1
            seen.append(views)
        assert all(len(views) == 49 for views in seen)


def test_coefficients_are_fresh() -> None:
    one, other = (ShamirSharing(2).split(bytes(32), [1, 2])[0] for _ in range(2))
    assert one != other


def test_damaged_shares_do_not_pass_as_a_secret_unseen() -> None:
    """Most damage gives another 32-byte secret (commitments catch it); the rest is refused here."""
    shares: dict[int, bytes] = dict(
        zip((1, 2), ShamirSharing(2).split(b"\x07" * 32, (1, 2)), strict=True)
    )
    shares[1] = bytes([shares[1][0] ^ 1]) + shares[1][1:]
    try:
        assert ShamirSharing(2).combine(shares) != b"\x07" * 32
    except ShareMismatchError as error:
        assert "damaged" in str(error)  # noqa: PT017  # either outcome is right


@pytest.mark.parametrize(
    ("threshold", "points", "error"),
    [(3, (1, 2), ThresholdError), (1, (1, 1), ValueError), (1, (0, 1), ValueError)],
)
def test_senseless_sharings_are_refused(threshold: int, points: Any, error: Any) -> None:
    with pytest.raises(error):
        ShamirSharing(threshold).split(bytes(32), points)
    with pytest.raises(ValueError, match="32 bytes, got 31"):
        ShamirSharing(1).split(bytes(31), (1,))
