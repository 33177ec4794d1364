import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedsim.data import DataError
from fedsim.data.partitions.division import partition
from fedsim.data.settings import (
    DirichletPartition,
    IidPartition,
    QuantityPartition,
    ShardsPartition,
)

SEEDS = st.integers(0, 2**64 - 1)
TARGETS = np.arange(600) % 10


def schemes(num_clients: int, min_examples: int = 1):
    common = {"num_clients": num_clients, "min_examples": min_examples}
    return (
        IidPartition(scheme="iid", **common),
        DirichletPartition(scheme="dirichlet", **common),
        ShardsPartition(scheme="shards", **common),
        QuantityPartition(scheme="quantity", **common),
    )


def assert_valid(shares, num_examples, settings):
    assert len(shares) == settings.num_clients
    assert sorted(np.concatenate(shares).tolist()) == list(range(num_examples))
    assert min(map(len, shares)) >= settings.min_examples
    assert all((np.diff(share) > 0).all() for share in shares)


@given(
    targets=st.lists(st.integers(-2, 5), min_size=1, max_size=80),
    num_clients=st.integers(1, 12),
    min_examples=st.integers(1, 5),
    scheme=st.integers(0, 3),
    seed=SEEDS,
)
def test_every_example_is_on_one_client_or_the_partition_is_refused(
    targets, num_clients, min_examples, scheme, seed
):
    settings = schemes(num_clients, min_examples)[scheme]
    if num_clients * min_examples > len(targets):
        with pytest.raises(DataError, match=r"^data\.partition: .* training examples"):
            partition(np.array(targets), settings, seed)
        return
    try:
        shares = partition(np.array(targets), settings, seed)
    except DataError:
        assert settings.scheme != "iid"
        return
    assert_valid(shares, len(targets), settings)


@pytest.mark.parametrize("settings", schemes(6, 3), ids=lambda s: s.scheme)
def test_the_seed_alone_decides(settings):
    first, again, other = (partition(TARGETS, settings, seed) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))
    assert_valid(first, len(TARGETS), settings)


def test_iid_shares_are_equal_and_mixed():
    shares = partition(TARGETS, IidPartition(scheme="iid", num_clients=7), 0)
    assert {len(share) for share in shares} == {85, 86}
    assert all(len(np.unique(TARGETS[share])) == 10 for share in shares)


def test_label_skew_falls_with_alpha():
    def skew(alpha: float) -> float:
        """Mean distance of the clients' class shares from uniform, in [0, 0.9]."""
        distances = []
        for seed in range(5):
            settings = DirichletPartition(scheme="dirichlet", num_clients=5, alpha=alpha)
            for share in partition(TARGETS, settings, seed):
                mix = np.bincount(TARGETS[share], minlength=10) / len(share)
                distances.append(np.abs(mix - 0.1).sum() / 2)
        return float(np.mean(distances))

    skews = [skew(alpha) for alpha in (0.1, 0.5, 2, 20, 1e6)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.4
    assert skews[-1] < 0.02


def test_size_skew_falls_with_alpha_and_labels_stay_mixed():
    def sizes(alpha: float) -> list[int]:
        settings = QuantityPartition(scheme="quantity", num_clients=4, alpha=alpha)
        return [len(share) for share in partition(TARGETS, settings, 3)]

    assert np.std(sizes(0.5)) > np.std(sizes(10)) > np.std(sizes(1e6))
    assert sizes(1e6) == pytest.approx([150] * 4, abs=2)
    settings = QuantityPartition(scheme="quantity", num_clients=4, min_examples=60)
    for share in partition(TARGETS, settings, 0):
        assert len(np.unique(TARGETS[share])) == 10


def test_dirichlet_favours_no_client():
    settings = DirichletPartition(scheme="dirichlet", num_clients=10, alpha=1.0)
    sizes = np.mean(
        [[len(share) for share in partition(TARGETS, settings, s)] for s in range(200)], axis=0
    )
    # Mean 60; the standard error of a client's mean size is about 1.2, so 5 of them.
    assert sizes == pytest.approx(np.full(10, 60), abs=6)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    num_clients=st.integers(1, 12),
    per_client=st.integers(1, 8),
    seed=SEEDS,
)
def test_shards_hold_exactly_k_classes_balanced_over_clients(sizes, num_clients, per_client, seed):
    classes = len(sizes)
    assume(per_client <= classes <= num_clients * per_client)
    assume(num_clients * per_client <= sum(min(size, num_clients) for size in sizes))
    targets = np.repeat(np.arange(classes), sizes)
    settings = ShardsPartition(
        scheme="shards", num_clients=num_clients, classes_per_client=per_client
    )
    shares = partition(targets, settings, seed)
    assert_valid(shares, len(targets), settings)
    held = [set(targets[share].tolist()) for share in shares]
    assert all(len(found) == per_client for found in held)
    holders = [sum(label in found for found in held) for label in range(classes)]
    assert min(holders) >= 1
    free = [n for n, size in zip(holders, sizes, strict=True) if n < min(size, num_clients)]
    assert not free or max(holders) - min(free) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_clients": 4, "classes_per_client": 2},
            "raise classes_per_client to 3 or num_cli.* 5",
        ),
        ({"num_clients": 4, "classes_per_client": 11}, "at most the number of classes, 10, got 11"),
    ],
)
def test_impossible_shards_name_the_fix(arguments, message):
    with pytest.raises(DataError, match=message):
        partition(TARGETS, ShardsPartition(scheme="shards", **arguments), 0)


def test_shards_of_scarce_classes_are_refused():
    targets = np.array([0] * 20 + [1] * 2)
    settings = ShardsPartition(scheme="shards", num_clients=5, classes_per_client=2)
    with pytest.raises(DataError, match="too few examples to put 2 classes on each of 5 clients"):
        partition(targets, settings, 0)


@pytest.mark.parametrize("settings", schemes(10, 61), ids=lambda s: s.scheme)
def test_more_than_there_is_cannot_be_asked_for(settings):
    with pytest.raises(DataError, match="need 610 training examples, there are 600"):
        partition(TARGETS, settings, 0)


def test_an_unreachable_minimum_is_refused_after_a_bounded_search():
    (settings,) = (s for s in schemes(10, 59) if isinstance(s, DirichletPartition))
    with pytest.raises(DataError, match=r"scheme dirichlet.*min_examples 59.*raise alpha"):
        partition(TARGETS, settings, 0)


@pytest.mark.parametrize(
    ("num_clients", "alpha", "least"), [(100, 0.5, 1), (50, 0.1, 1), (10, 0.1, 59)]
)
def test_size_skew_keeps_its_minimum_with_many_clients(num_clients, alpha, least):
    settings = QuantityPartition(
        scheme="quantity", num_clients=num_clients, alpha=alpha, min_examples=least
    )
    sizes = [len(share) for share in partition(TARGETS, settings, 0)]
    assert min(sizes) >= least
    assert max(sizes) > 2 * np.median(sizes) - least
    assert sum(sizes) == 600


@pytest.mark.parametrize("settings", schemes(3)[1:3], ids=lambda s: s.scheme)
@pytest.mark.parametrize("targets", [TARGETS.astype(np.float32), np.zeros((600, 2), np.float32)])
def test_label_skew_needs_classes(settings, targets):
    with pytest.raises(DataError, match="use scheme iid or quantity"):
        partition(targets, settings, 0)


@pytest.mark.parametrize("settings", schemes(3)[::3], ids=lambda s: s.scheme)
def test_regression_targets_can_be_divided_without_labels(settings):
    assert_valid(partition(np.zeros((600, 2), np.float32), settings, 0), 600, settings)
