"""Shares are uniform for every secret; the tests detect shares that are not."""

import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fedsim.secagg.additive import split
from fedsim.secagg.masks import SeedExpander, derive_key

INFOS = (b"helper 1", b"helper 2")
FALSE_ALARM = 1e-6  # of each byte position, for a share that is uniform


class RingOfEight(SeedExpander):
    """A keystream of one element of Z_2^3, given by the seed."""

    def __init__(self, values: int = 8) -> None:
        super().__init__()
        self._value = {
            derive_key(bytes([seed]) * 32, info): seed for seed in range(values) for info in INFOS
        }

    def add_into(self, vector: Any, keys: Any, *, subtract: bool = False) -> None:
        for key in keys:
            vector += self._value[key] * (7 if subtract else 1)  # -1 is 7 modulo 8
            vector %= 8


def _views(secret: int, values: int) -> dict[tuple[int, ...], Counter[tuple[int, ...]]]:
    """Counts of each pair of shares over all seeds, for each choice of two of three shares."""
    views = {pair: Counter() for pair in itertools.combinations(range(3), 2)}
    ring = RingOfEight(values)
    for seeds in itertools.product(range(values), repeat=2):
        share = np.array([secret], np.uint64)
        drawn = [bytes([seed]) * 32 for seed in seeds]
        with patch("fedsim.secagg.additive.new_seed", iter(drawn).__next__):
            given = split(share, INFOS, ring)
        shares = (int(share[0]), given[0][0], given[1][0])
        assert sum(shares) % 8 == secret
        for pair, seen in views.items():
            seen[tuple(shares[one] for one in pair)] += 1
    return views


def _hides(values: int) -> bool:
    views = [_views(secret, values) for secret in range(8)]
    uniform = all(
        len(seen) == 64 and set(seen.values()) == {1} for view in views for seen in view.values()
    )
    return uniform and all(view == views[0] for view in views)


def test_any_two_of_three_shares_are_exactly_uniform_for_every_secret() -> None:
    """A proof by enumeration: 8 secrets, all 64 draws of seeds, all 3 coalitions."""
    assert _hides(8)
    assert not _hides(7)  # masks that miss a value


def byte_p_values(share: NDArray[np.uint64]) -> list[float]:
    """p-values of the hypothesis that each of the 8 byte positions is uniform."""
    table = share.astype("<u8").view(np.uint8).reshape(-1, 8)
    return [
        float(stats.chisquare(np.bincount(table[:, place], minlength=256)).pvalue)
        for place in range(8)
    ]


def looks_uniform(share: NDArray[np.uint64]) -> bool:
    return min(byte_p_values(share)) > FALSE_ALARM


def leader_share(secret: int, size: int = 1 << 18) -> NDArray[np.uint64]:
    share = np.full(size, secret, np.uint64)
    split(share, [b"a"], SeedExpander())
    return share


@pytest.mark.parametrize("secret", [0, 1, 2**64 - 1])
def test_shares_of_constants_are_uniform_in_every_byte(secret: int) -> None:
    assert looks_uniform(leader_share(secret))
    # Two clients' shares must not be related either: their difference would cancel a common mask.
    assert looks_uniform(leader_share(secret) - leader_share(secret))


def test_p_values_of_shares_are_uniform() -> None:
    """Kolmogorov-Smirnov over 32 shares x 8 bytes; false alarm 1e-6."""
    values = [p for _ in range(32) for p in byte_p_values(leader_share(1, 1 << 14))]
    assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM


NEGATIVE: dict[str, Callable[[], NDArray[np.uint64]]] = {
    "plaintext": lambda: np.full(1 << 18, 5, np.uint64),
    "bounded mask": lambda: (leader_share(0) >> np.uint64(1)) + np.uint64(5),
    "mask without its largest byte": lambda: leader_share(0).view(np.uint8).clip(0, 254).view("u8"),
    "one seed for two clients": lambda: (lambda mask: (mask + np.uint64(9)) - mask)(
        leader_share(0)
    ),
    "32-bit mask": lambda: leader_share(0) & np.uint64(2**32 - 1),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_the_uniformity_test_rejects_bad_masks(name: str) -> None:
    assert not looks_uniform(NEGATIVE[name]())


@pytest.mark.parametrize("aggregators", [2, 3])
def test_every_seed_is_32_fresh_bytes_of_the_operating_system(
    secure_parties: Any,
    same_bits: Any,
    monkeypatch: pytest.MonkeyPatch,
    aggregators: int,
) -> None:
    """Spies on os.urandom: per client, helper and round one draw of its own."""
    drawn: list[bytes] = []
    real = os.urandom

    def spy(count: int) -> bytes:
        drawn.append(real(count))
        return drawn[-1]

    scene = secure_parties(aggregators=aggregators)
    leaders = [scene.leader(1), scene.leader(2)]
    monkeypatch.setattr(os, "urandom", spy)
    for leader in leaders:
        for client in range(6):
            leader.add(scene.upload(leader, client))
    monkeypatch.undo()
    assert len(drawn) == 2 * 6 * (aggregators - 1)
    assert {len(seed) for seed in drawn} == {32}
    assert len(set(drawn)) == len(drawn)


def test_runs_differ_in_every_share_and_not_in_the_sum(secure_parties: Any, same_bits: Any) -> None:
    """All other generators have equal seeds; only the shares draw from the operating system."""
    results, shares = [], []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002  # must not change the result
        scene = secure_parties()
        leader = scene.leader()
        uploads = [scene.upload(leader, client) for client in range(6)]
        for upload in uploads:
            leader.add(upload)
        scene.combine(leader)
        results.append(leader.open(reference=scene.reference))
        shares.append([upload.share for upload in uploads])
    assert same_bits(*results)
    assert not any((a == b).any() for a, b in zip(*shares, strict=True))


def test_the_leader_cannot_tell_two_sets_of_updates_with_one_sum(secure_parties: Any) -> None:
    """Its view is the shares of all clients. Chi-square of two views; false alarm 1e-6 a byte."""
    size = 1 << 14
    for scale in (0.0, 1.0):
        scene = secure_parties(clients=4, shapes={"w": (size,)})
        for client, sign in enumerate((1, -1, 1, -1)):
            change = np.full(size, sign * scale, np.float32)
            scene.updates[client] = {"w": scene.reference["w"] + change}
        leader = scene.leader()
        views = [scene.upload(leader, client).share for client in range(4)]
        assert all(looks_uniform(view) for view in views)
        assert looks_uniform(views[0] - views[1])
        clear = scene.codec.encode(scene.updates[0], reference=scene.reference, weight=3)
        assert not looks_uniform(clear)
