import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits as sklearn_digits

from fedsim.data import DataError, FederatedData, load_federated_data
from fedsim.data.builtin import scikit
from fedsim.data.builtin.scikit import load_digits
from fedsim.data.settings import DataSettings

IID = {"scheme": "iid", "num_clients": 3}


def load(base: Path, seed: int = 0, **settings) -> FederatedData:
    checked = DataSettings.model_validate({"partition": IID, **settings})
    return load_federated_data(checked, seed=seed, base=base)


def module(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"import numpy as np\ndef load(seed=0, n=20):\n    {body}\n")
    return "./mine.py:load"


@pytest.mark.parametrize("in_its_place", [True, False])
def test_digits_are_scikit_learns(in_its_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scikit._digits.cache_clear()
    if not in_its_place:
        monkeypatch.setattr(scikit, "installed_file", lambda package, path: None)
    images, classes = map(np.asarray, sklearn_digits(return_X_y=True))
    digits = load_digits().train
    assert digits.input_shape == (1, 8, 8)
    assert np.array_equal(digits.features.reshape(1797, 64), np.float32(images) / 16)
    assert np.array_equal(digits.targets, classes)
    assert (digits.features.dtype, digits.targets.dtype) == (np.float32, np.int64)


def test_digits_are_divided_among_clients(tmp_path):
    data = load(tmp_path, dataset="digits", partition={"scheme": "dirichlet", "num_clients": 10})
    assert len(data.clients) == 10
    assert len(data.test) == 359
    assert sum(data.clients.sizes) == sum(map(len, data.clients)) == 1438
    assert (data.num_classes, data.input_shape) == (10, (1, 8, 8))
    rows = np.concatenate([e.features.reshape(len(e), -1) for e in (*data.clients, data.test)])
    whole = load_digits().train.features.reshape(1797, -1)
    assert np.array_equal(np.sort(rows.sum(axis=1)), np.sort(whole.sum(axis=1)))


def test_the_seed_alone_decides(tmp_path):
    one, again, other = (load(tmp_path, seed, dataset="digits") for seed in (0, 0, 1))
    assert np.array_equal(one.clients[1].features, again.clients[1].features)
    assert not np.array_equal(one.clients[1].features, other.clients[1].features)
    assert not np.array_equal(one.test.features, other.test.features)


def test_a_function_gets_the_seed_and_the_arguments(tmp_path):
    name = module(tmp_path, "return np.full((n, 2), seed), np.arange(n) % 3")
    data = load(tmp_path, seed=7, dataset=name, args={"n": 30})
    assert sum(data.clients.sizes) == 24
    assert data.test.features[0, 0] == 7
    assert load(tmp_path, seed=7, dataset=name, args={"seed": 3}).test.features[0, 0] == 3


def test_a_function_may_bring_its_own_test_set(tmp_path):
    name = module(tmp_path, "x = np.ones((n, 1)); y = x[:, 0] / 2; return x, y, x[:4], y[:4]")
    data = load(tmp_path, dataset=name)
    assert (sum(data.clients.sizes), len(data.test), data.num_classes) == (20, 4, None)
    with pytest.raises(DataError, match="test_fraction must be left out"):
        load(tmp_path, dataset=name, test_fraction=0.5)


def test_negative_whole_numbers_are_no_classes(tmp_path):
    name = module(tmp_path, "return np.ones((n, 1)), np.arange(n) - 5")
    assert load(tmp_path, dataset=name).num_classes is None


def test_a_file_is_read_relative_to_the_experiment(tmp_path):
    (tmp_path / "table.csv").write_text("a,b,y\n" + "1,2,0\n3,4,1\n" * 10)
    data = load(tmp_path, dataset={"path": "table.csv", "target": "y"})
    assert (sum(data.clients.sizes), data.num_classes, data.input_shape) == (16, 2, (2,))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "must return .* got int"),
        ("return 1, 2, 3", "must return .* got 3 values"),
        ("return np.ones((n, 1)), np.ones(n - 1)", "20 rows of features and 19 targets"),
        ("raise KeyError('a')", r"failed with KeyError: 'a' \(mine.py, line 3\)"),
        ("return np.zeros((n, 1)).reshape(7, 7)", r"ValueError: cannot .* \(mine.py, line 3\)"),
    ],
)
def test_failing_functions_are_named_on_one_line(body, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, dataset=module(tmp_path, body))
    assert str(caught.value).startswith("data.dataset './mine.py:load': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "digit"}, "did you mean digits?"),
        ({"dataset": "cifar"}, "did you mean cifar10?"),
        ({"dataset": "nothing"}, "built in: digits"),
        (
            {"dataset": "digits", "args": {"n": 3}},
            r"data.args.n: Extra inputs .* \(dataset digits\)",
        ),
        ({"dataset": "./absent.py:load"}, "no such file"),
        ({"dataset": {"path": "absent.csv", "target": "y"}}, "no such file"),
    ],
)
def test_unknown_datasets_are_refused(settings, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load(tmp_path, **settings)


def test_unknown_arguments_are_named(tmp_path):
    name = module(tmp_path, "return None")
    with pytest.raises(DataError, match="unexpected keyword argument 'm'; it is called with"):
        load(tmp_path, dataset=name, args={"m": 3})


def test_settings_and_catalog_are_light_to_import_and_digits_need_no_torch():
    code = (
        "import sys, fedsim.data.settings, fedsim.data.catalog, fedsim.models.settings, "
        "fedsim.models.catalog; "
        "print([m for m in ('torch', 'sklearn', 'numpy', 'flwr') if m in sys.modules]); "
        "from fedsim.data.builtin.scikit import load_digits; load_digits(); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == ["[]", "False"]
