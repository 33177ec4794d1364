"""Clients' examples are gathered on access: memory holds one dataset for any number of clients."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.data import DataError, Examples, load_federated_data
from fedsim.data.load import ClientExamples
from fedsim.data.settings import DataSettings
from fedsim.federation.trained_model import ClientTensors, order_by_client
from fedsim.models.features.transforms import FeaturePipeline
from fedsim.models.settings import FeatureSettings
from fedsim.runs.runner import run_experiment


def numbered(n: int, width: int = 3) -> Examples:
    x = np.arange(n * width, dtype=np.float32).reshape(n, width)
    return Examples(x, np.arange(n) % 5)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Examples, dict[int, np.ndarray]]:
    n = draw(st.integers(1, 30))
    owner = np.array(draw(st.lists(st.integers(-1, 4), min_size=n, max_size=n)))
    return numbered(n), {client: np.flatnonzero(owner == client) for client in range(5)}


@given(divisions(), st.sets(st.integers(0, 4)))
def test_every_client_gets_its_own_rows_from_a_subset_or_all(
    case: tuple[Examples, dict[int, np.ndarray]], here: set[int]
) -> None:
    source, rows = case
    clients = ClientExamples(source, rows)
    some = clients.select(sorted(here))
    assert clients.sizes == [len(rows[client]) for client in range(5)]
    assert len(some) == len(clients) == 5
    for client in range(5):
        expected = source.rows(rows[client])
        np.testing.assert_array_equal(clients[client].features, expected.features)
        np.testing.assert_array_equal(clients[client].targets, expected.targets)
        if client in here:
            for packed in (some, some.copy()):
                np.testing.assert_array_equal(packed[client].features, expected.features)
                np.testing.assert_array_equal(packed[client].targets, expected.targets)
        else:
            with pytest.raises(KeyError, match=f"client {client} are in another process"):
                _ = some[client]
    assert [len(one) for one in some] == [len(rows[client]) for client in sorted(here)]


def test_gathered_examples_are_a_copy() -> None:
    clients = ClientExamples(numbered(6), {0: np.array([1, 3]), 1: np.array([0, 5])})
    clients[0].features[:] = -1
    assert clients[0].features.min() >= 0
    with pytest.raises(IndexError):
        _ = clients[2]
    assert len(clients[-1]) == 2


def test_dividing_a_dataset_copies_nothing(tmp_path: Path) -> None:
    """tracemalloc counts numpy's allocations; a copy would take as much as the dataset."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nX = np.ones((40_000, 100), dtype=np.float32)\n"
        "def load(seed=0):\n    return X, np.arange(len(X)) % 7, X[:10], np.arange(10) % 7\n"
    )
    settings = DataSettings.model_validate(
        {"dataset": "./mine.py:load", "partition": {"scheme": "iid", "num_clients": 2_000}}
    )
    load_federated_data(settings, seed=0, base=tmp_path)  # imports the module with the data
    tracemalloc.start()
    try:
        data = load_federated_data(settings, seed=0, base=tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    dataset = 40_000 * 100 * 4
    assert len(data.clients) == 2_000
    assert peak < 0.5 * dataset


def test_large_clients_get_views_of_one_array_in_their_order() -> None:
    clients = ClientExamples(numbered(40), {0: np.arange(0, 40, 2), 1: np.arange(1, 40, 2)})
    size = clients.nbytes
    assert size == sum(each.features.nbytes + each.targets.nbytes for each in clients)
    few = "a round uses 5 of 20 examples, so they are gathered"
    assert order_by_client(clients, examples_per_round=5, small_bytes=size - 1) is clients, few
    packed = order_by_client(clients, examples_per_round=4, small_bytes=0)
    assert packed[0].features.base is packed[1].features.base is not None
    for client in range(2):
        np.testing.assert_array_equal(packed[client].features, clients[client].features)


def test_small_data_are_always_put_into_the_clients_order() -> None:
    clients = ClientExamples(numbered(40), {0: slice(20, 40), 1: np.arange(0, 20)})
    packed = order_by_client(clients, examples_per_round=1_000)
    assert packed[0].features.base is packed[1].features.base is not None
    for client in range(2):
        np.testing.assert_array_equal(packed[client].features, clients[client].features)


def test_data_on_disk_stay_there_and_change_no_bit(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((300, 6), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom pathlib import Path\n"
        "def load(seed=0, mode=None):\n"
        "    x = np.load(Path(__file__).parent / 'x.npy', mmap_mode=mode)\n"
        "    return x, (np.asarray(x[:, 0]) > 0).astype(np.int64)\n"
    )
    experiment = {
        "name": "disk",
        "data": {
            "dataset": "./mine.py:load",
            "args": {"mode": "r"},
            "partition": {"scheme": "iid", "num_clients": 3},
        },
        "model": {"name": "mlp", "args": {"hidden": [4]}},
        "federation": {"rounds": 1},
        "local": {"steps": 2, "batch_size": 4},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }
    settings = DataSettings.model_validate(experiment["data"])
    mapped = load_federated_data(settings, seed=0, base=tmp_path).clients
    assert not mapped.is_in_memory
    assert order_by_client(mapped, examples_per_round=1) is mapped
    for features in ([], ["log", "unit_norm"]):
        models = []
        for mode in ("r", None):
            overrides = {"data.args": {"mode": mode}, "model.features": features}
            out = tmp_path / f"run-{mode}-{len(features)}"
            run_experiment(experiment, overrides=overrides, base=tmp_path, out=out)
            models.append((out / "model.safetensors").read_bytes())
        assert models[0] == models[1]


def test_features_of_data_on_disk_are_computed_once_and_kept(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(6).features)
    source = Examples(np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(6))
    pipeline = FeaturePipeline([FeatureSettings.model_validate({"center": 1.0})])
    clients = ClientExamples(source, {0: np.array([1, 3])}, transform=pipeline)
    tensors = ClientTensors(clients, torch.device("cpu"))
    first, _ = tensors.of(0)
    assert torch.equal(first, torch.from_numpy(source.features[[1, 3]] - 1))
    assert tensors.of(0)[0].data_ptr() == first.data_ptr()
    packed = clients.select([0])
    assert packed.is_in_memory
    assert np.array_equal(packed[0].features, first.numpy())


def test_tensors_are_built_on_access_and_not_cached_on_the_cpu() -> None:
    clients = ClientExamples(numbered(6), {0: np.array([1, 3]), 1: np.array([0, 5])})
    tensors = ClientTensors(clients, torch.device("cpu"))
    features, targets = tensors.of(1)
    assert torch.equal(features, torch.from_numpy(clients[1].features))
    assert torch.equal(targets, torch.from_numpy(clients[1].targets))
    assert tensors.of(1)[0].data_ptr() != features.data_ptr()


def test_wrong_numbers_are_found_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.data.examples._CHUNK_VALUES", 4)
    x = np.ones((11, 3), dtype=np.float32)
    x[[2, 10], 1] = np.nan
    with pytest.raises(DataError, match="in 2 of 11 examples, first in example 2"):
        Examples(x, np.arange(11))
