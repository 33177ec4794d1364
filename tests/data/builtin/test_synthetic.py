"""Synthetic datasets have the laws of their papers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import DataError, load_federated_data
from fedsim.data.catalog import DATASETS
from fedsim.data.examples import Dataset
from fedsim.data.settings import DataSettings, LoadContext
from fedsim.data.sources import LOADERS


def load(name: str, seed: int = 0, **args: Any) -> Dataset:
    return LOADERS[name](DATASETS[name].args.model_validate(args), LoadContext(seed, Path()))


def by_user(data: Dataset, values: np.ndarray) -> list[np.ndarray]:
    users = np.array(data.groups["user"])
    return [values[users == user] for user in np.unique(users)]


def test_fedprox_has_its_users_features_and_classes() -> None:
    data = load("synthetic_fedprox")
    sizes = [len(own) for own in by_user(data, data.train.targets)]
    assert (len(sizes), min(sizes) >= 50) == (30, True)
    assert data.train.input_shape == (60,)
    assert set(data.train.targets.tolist()) <= set(range(10))
    assert data.groups["user"][0] == "00"


def test_sizes_of_fedprox_are_lognormal() -> None:
    data = load("synthetic_fedprox", users=400, dimension=1, classes=2)
    sizes = np.array([len(own) for own in by_user(data, data.train.targets)])
    assert np.median(np.log(sizes - 49.5)) == pytest.approx(4, abs=0.4)


def test_variances_of_features_decay() -> None:
    data = load("synthetic_fedprox", users=5, iid=True)
    variances = data.train.features.var(axis=0)
    assert np.allclose(variances * np.arange(1, 61) ** 1.2, 1, atol=0.5)
    assert np.allclose(data.train.features.mean(axis=0), 0, atol=0.2)


def test_alpha_and_beta_make_users_differ() -> None:
    def spread(name: str, **args: Any) -> tuple[float, float]:
        data = load(name, users=60, dimension=40, **args)
        centres = np.array([own.mean(axis=0) for own in by_user(data, data.train.features)])
        labels = [np.bincount(own, minlength=10) for own in by_user(data, data.train.targets)]
        return float(centres.var(axis=0).mean()), float(
            np.mean([c.max() / c.sum() for c in labels])
        )

    for name in ("synthetic_fedprox", "synthetic_logistic"):
        none, beta = spread(name, alpha=0, beta=0), spread(name, alpha=0, beta=3)
        assert none[0] == pytest.approx(1, abs=0.35)
        assert beta[0] == pytest.approx(10 if name == "synthetic_fedprox" else 4, rel=0.5)
    assert spread("synthetic_logistic", alpha=0, beta=5)[1] > 0.5


def test_logistic_has_equal_users_and_noisy_labels() -> None:
    clean, noisy = (load("synthetic_logistic", label_noise=p) for p in (0, 0.5))
    assert {len(own) for own in by_user(clean, clean.train.targets)} == {500}
    assert len(clean.train) == 50_000
    assert np.array_equal(clean.train.features, noisy.train.features)
    share = (clean.train.targets != noisy.train.targets).mean()
    assert share == pytest.approx(0.5 * 0.9, abs=0.02)


def test_iid_users_share_one_model() -> None:
    data = load("synthetic_logistic", iid=True, users=4, examples=5000, label_noise=0)
    shares = np.array([np.bincount(own, minlength=10) for own in by_user(data, data.train.targets)])
    assert np.ptp(shares / 5000, axis=0).max() < 0.05


@pytest.mark.parametrize("name", ["synthetic_fedprox", "synthetic_logistic"])
def test_users_are_the_clients(name: str) -> None:
    settings = DataSettings.model_validate(
        {
            "dataset": name,
            "args": {"users": 12, "dimension": 3},
            "partition": {"scheme": "column", "column": "user"},
        }
    )
    data = load_federated_data(settings, seed=0, base=Path())
    whole = load(name, users=12, dimension=3)
    assert data.client_names == tuple(f"{user:02d}" for user in range(12))
    for own, features in zip(data.clients, by_user(whole, whole.train.features), strict=True):
        assert {row.tobytes() for row in own.features} <= {row.tobytes() for row in features}
    assert sum(data.clients.sizes) + len(data.test) == len(whole.train)


def test_blobs() -> None:
    data = load("blobs", examples=31, classes=4, dimension=3, spread=0)
    assert len(np.unique(data.train.features, axis=0)) == 4
    assert np.abs(data.train.features).max() <= 1
    assert np.bincount(data.train.targets).tolist() == [8, 8, 8, 7]


@pytest.mark.parametrize("name", ["synthetic_fedprox", "synthetic_logistic", "blobs"])
def test_the_seed_decides_and_a_users_examples_are_its_own(name: str) -> None:
    one, again, other = load(name), load(name), load(name, seed=1)
    assert np.array_equal(one.train.features, again.train.features)
    assert not np.array_equal(one.train.features[:9], other.train.features[:9])
    fixed = LOADERS[name](DATASETS[name].args.model_validate({"seed": 0}), LoadContext(5, Path()))
    assert np.array_equal(fixed.train.features, one.train.features)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("blobs", {"examples": 10**9, "dimension": 10**6}),
        ("synthetic_fedprox", {"dimension": 10**6, "classes": 10**6}),
        ("synthetic_logistic", {"users": 10**6, "examples": 10**6}),
    ],
)
def test_data_beyond_memory_are_refused(name: str, args: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"classes need [\d,]+ GiB, and this machine has"):
        load(name, **args)
