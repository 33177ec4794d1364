"""The studies: formulas, tests of laws, the readers of users' files, and reduced sizes."""

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from opacus.accountants import RDPAccountant
from scipy.io import savemat
from sklearn.model_selection import train_test_split

from experiments.reproductions.runs import FILES

SEEDS = 4
WITHOUT_FILES = (
    "dp_scaffold_k50",
    "fedprox",
    "heart_disease",
    "mean_estimation",
    "moments_accountant",
    "opacus_mnist_epsilon",
    "pooled_dp_sgd",
)


def study(name: str) -> ModuleType:
    return import_module(f"experiments.reproductions.studies.{name}")


def file(name: str) -> ModuleType:
    return import_module(f"experiments.reproductions.files.{name}")


def setup(out: Path, **settings: Any) -> Any:
    whole = {"size": "reduced", "seeds": range(SEEDS), "out": out, "data": out, "workers": 1}
    return import_module("experiments.reproductions.study").Setup(**{**whole, **settings})


@pytest.mark.parametrize("name", ["moments_accountant", "opacus_mnist_epsilon"])
def test_published_epsilons(name: str, tmp_path: Path) -> None:
    verdicts = [row.verdict for row in study(name).measure(setup(tmp_path))]
    assert set(verdicts) == {"agrees", "context"}
    assert verdicts.count("agrees") >= 4


def test_strong_composition_with_proven_amplification_is_larger(tmp_path: Path) -> None:
    module = study("moments_accountant")
    assert module.strong_as_proven(10_000) > 1.5 * module.strong_as_published(10_000)


def test_permutation_tests_see_a_spread_and_no_difference() -> None:
    module = study("pooled_dp_sgd")
    rng = np.random.default_rng(0)
    one, same = rng.standard_normal((2, 12, 500))
    other = 0.9 * rng.standard_normal((12, 500))

    def p_values(models: np.ndarray) -> list[float]:
        spread = ((models - models.mean(0)) ** 2).sum(1)
        distances = np.linalg.norm(models[:, None] - models[None], axis=-1)
        tests = [module.Test(name="", values=values) for values in (distances, spread)]
        return [test.p_value() for test in tests]

    assert min(p_values(np.concatenate([one, same]))) > 0.01
    assert p_values(np.concatenate([one, other]))[1] < 1e-3
    assert p_values(np.concatenate([one, same + 1.0]))[0] < 1e-3


def test_the_closed_form_of_mean_estimation_is_an_optimum() -> None:
    module = study("mean_estimation")
    best, least = module.closed_form(0.08, 18.0)
    assert best == pytest.approx((0.16 + 18**2 / 200) / 200 / 0.08**2)
    rng = np.random.default_rng(0)
    centres = 0.08 * rng.standard_normal((2000, module.SILOS))
    noise = (0.16 / 200 + (18 / 200) ** 2) ** 0.5
    trials = module.Trials(
        centres=centres, releases=centres + noise * rng.standard_normal(centres.shape)
    )
    assert trials.best_share() == pytest.approx(best / (1 + best), abs=0.01)
    assert trials.error(best / (1 + best)) == pytest.approx(least, rel=0.02)


def test_a_release_is_the_clipped_mean_with_the_noise_of_its_multiplier() -> None:
    module = study("mean_estimation")
    values = np.tile(np.array([-4.0, 0.25, 0.5]), (300, 1))
    exact = module.release(values[:1], 1e-6, np.random.SeedSequence(0))
    assert exact[0] == pytest.approx((-1.0 + 0.25 + 0.5) / 3, abs=1e-5)
    noisy = module.release(values, 2.0, np.random.SeedSequence(0)) - exact
    assert noisy.std() == pytest.approx(2.0 / 3, rel=0.2)


def test_schools_are_standardised_and_divided_as_by_the_authors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = np.empty((1, 3), dtype=object), np.empty((1, 3), dtype=object)
    for number, size in enumerate((20, 30, 90)):
        x[0, number] = np.c_[rng.normal(5, 3, (size, 4)), np.ones(size)]
        y[0, number] = rng.integers(1, 71, (size, 1))
    path = str(tmp_path / "school.mat")
    savemat(path, {"X": x, "Y": y})
    school = file("school")
    x_train, y_train, x_test, y_test = school.load(path, seed=1)
    silos = school.silos(x_train, y_train, path, seed=1)
    assert np.bincount(silos).tolist() == [16, 24, 72]
    assert np.bincount(school.silos(x_test, y_test, path, seed=1, part="test")).tolist() == [
        4,
        6,
        18,
    ]
    assert school.sampling_rates(path) == [1, 1, 1 / 2]  # batches of 32, the last left out
    of_train, _ = train_test_split(np.arange(20), test_size=0.2, random_state=1100)
    assert y_train[:16] == pytest.approx((y[0, 0].ravel()[of_train] - 1) / 69)
    for silo in range(3):
        own = x_train[silos == silo]
        assert np.allclose(own.mean(0), 0, atol=1e-6)
        assert np.allclose(own.std(0), [1, 1, 1, 1, 0], atol=1e-5)
    assert min(y_train.min(), y_test.min()) >= 0
    assert max(y_train.max(), y_test.max()) <= 1
    assert not np.array_equal(school.load(path, seed=2)[1], y_train)


def test_hearts_are_split_and_normalised_as_in_flamby() -> None:
    heart = file("heart")
    x_train, y_train, x_test, y_test = heart.load()
    centres = heart.centres(x_train, y_train)
    names = list(dict.fromkeys(centres.tolist()))
    assert [int((centres == name).sum()) for name in names] == [199, 172, 30, 85]
    assert (x_train.shape, x_test.shape) == ((486, 13), (254, 13))
    for name in names:
        inside = x_train[centres == name]
        assert np.allclose(inside.mean(0), 0, atol=1e-5)
        deviations = inside.std(0, ddof=1)
        assert (np.isclose(deviations, 1, atol=1e-5) | (deviations == 0)).all()
    outputs = torch.from_numpy(np.where(y_test > 0, 1.0, -1.0))[:, None]
    outputs[:104] = -outputs[:104]  # all patients of the first hospital are wrong
    assert heart.mean_accuracy(outputs, torch.from_numpy(y_test)) == 0.75


def test_the_noise_of_flamby_is_that_of_opacus_for_fifteen_epochs() -> None:
    privacy = yaml.safe_load((FILES / "heart.yaml").read_text())["privacy"]
    variants = yaml.safe_load((FILES / "heart_compare.yaml").read_text())["variants"]
    clients_of = {
        10: privacy["clients"],
        **{epsilon: variants[f"eps-{epsilon}"]["privacy.clients"] for epsilon in (5, 1)},
    }
    for epsilon, clients in clients_of.items():
        for client, patients in enumerate((199, 172, 30, 85)):
            settings = clients[str(client)]
            rate = 1 / math.ceil(patients / 4)
            assert settings["sampling_rate"] == pytest.approx(rate)
            theirs = RDPAccountant()
            theirs.history = [(settings["noise_multiplier"], rate, round(15 / rate))]
            spent = theirs.get_epsilon(privacy["delta"])
            assert epsilon - 0.01 < spent <= epsilon  # where Opacus ends its search for the noise


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_a_study_at_reduced_size(name: str, tmp_path: Path) -> None:
    found = import_module("experiments.reproductions.study").find_studies()[name]
    seeds = range(found.seeds["reduced"])
    rows = found.measure(setup(tmp_path, seeds=seeds))
    assert [row.what for row in rows if row.verdict == "differs"] == []
    assert any(row.verdict == "agrees" for row in rows)


@pytest.mark.long
def test_the_control_finds_a_noise_that_is_too_small(tmp_path: Path) -> None:
    found = import_module("experiments.reproductions.study").find_studies()["pooled_dp_sgd"]
    rows = found.measure(setup(tmp_path, seeds=range(10)))
    spread = [row for row in rows if row.what.startswith("control") and "spread" in row.what]
    assert float(spread[0].measured.removeprefix("p = ")) < 1e-3
