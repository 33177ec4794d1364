"""`validate --data` finds what a run would find, without a trace of private values."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.clients.mechanisms.plan import PrivacyBudgetError
from fedsim.core.errors import FedsimError
from fedsim.experiment import LoadedExperiment, load_experiment, read_settings
from fedsim.federation import mechanism_probe
from fedsim.planning.validation import check_data, find_footprint
from fedsim.runs.runner import run_experiment

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
LABELS = np.arange(60) % 3
SMALL: dict[str, Any] = {
    "name": "found",
    "data": {
        "dataset": {"path": "images.npz", "target": "y"},
        "partition": {"scheme": "iid", "num_clients": 2},
    },
    "model": {"name": "cnn", "args": {"channels": [4], "hidden": 4}},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
}
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(arrays: Mapping[str, Any] | None = None, **changes: Any) -> Path:
        np.savez(tmp_path / "images.npz", **(arrays or {"x": IMAGES, "y": LABELS}))
        content = {**SMALL, **{key: value for key, value in changes.items() if key != "data"}}
        content["data"] = {**SMALL["data"], **changes.get("data", {})}
        path = tmp_path / "exp.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return written


def test_findings_describe_the_data(write: Write) -> None:
    found = check_data(load_experiment(write()))
    facts = found.to_json()
    assert facts["input_shape"] == (3, 8, 8)
    assert (facts["clients"], facts["client_examples"]) == (2, (24, 24))
    assert facts["test_examples"] == 12
    assert 0 <= found.test_range[0] < 0.1 < 0.9 < found.test_range[1] <= 1
    assert found.test_classes is not None
    assert [*found.test_classes] == ["0", "1", "2"]
    assert sum(found.test_classes.values()) == 12
    assert found.hints == []
    assert any(line.startswith("an example has 3 x 8 x 8 values, from 0") for line in found.lines())


@pytest.mark.parametrize(
    ("privacy", "sizes"),
    [
        ({**PRIVATE}, (24, 24)),
        ({**PRIVATE, "adjacency": {"name": "add_remove", "declared_examples": 30}}, (30, 30)),
    ],
)
def test_private_numbers_of_examples_are_not_shown(
    write: Write, privacy: dict[str, Any], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mechanism_probe, "probe_mechanisms", lambda federation: None)
    found = check_data(load_experiment(write(privacy=privacy, model={"name": "logistic"})))
    assert found.client_examples == sizes
    assert str(found.to_json()).count("24") == (2 if sizes == (24, 24) else 0)


def test_hints_follow_from_the_public_test_set(write: Write) -> None:
    dark = write(arrays(x_test=np.zeros_like(IMAGES[:2]), y_test=LABELS[:2]))
    absent, constant = check_data(load_experiment(dark)).hints
    assert "no example of class 2" in absent
    assert "all features are 0 in the test set" in constant


def test_budgets_and_noise_are_checked_as_a_run_does(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[int] = []
    monkeypatch.setattr(
        mechanism_probe, "probe_mechanisms", lambda one: probed.append(one.num_clients)
    )
    model = {"name": "logistic"}
    check_data(load_experiment(write(privacy=PRIVATE, model=model)))
    assert probed == [2]
    short = {**PRIVATE, "target_epsilon": 0.01, "on_exhausted": "refuse"}
    with pytest.raises(PrivacyBudgetError):
        check_data(load_experiment(write(privacy=short, model=model)))


def arrays(x: Any = IMAGES, y: Any = LABELS, **others: Any) -> dict[str, Any]:
    return {"x": x, "y": y, **others}


GREY = IMAGES[..., 0]
TESTS = {"x_test": IMAGES, "y_test": LABELS}
BROKEN = np.moveaxis(np.where(IMAGES > 250, np.nan, IMAGES), -1, 1)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "floats with channels last": (arrays(IMAGES / 255), {}, "channels: last"),
    "another name": ({"x": IMAGES, "label": LABELS}, {}, "no array named 'y'; known: 'label'"),
    "grey floats": (arrays(GREY / 255), {}, "write data.images: {channels: none}"),
    "flat pixels": (arrays(IMAGES.reshape(60, -1)), {}, "cnn takes images of shape"),
    "a label too few": (arrays(y=LABELS[:-1]), {}, "60 rows of features and 59 targets"),
    "one-hot labels": (arrays(y=np.eye(3)[LABELS]), {}, "classification needs whole-number"),
    "classes from -1": (arrays(y=LABELS - 1), {}, "number them from 0"),
    "half a test set": (arrays(x_test=IMAGES), {}, "a test set needs both of"),
    "a smaller test set": (
        arrays(x_test=IMAGES[:, :4], y_test=LABELS), {}, "training and test features must have one"
    ),
    "a broken pixel": (arrays(BROKEN), {}, "NaN or infinity in"),
    "channels of grey images": (arrays(GREY), {"images": {"channels": "last"}}, "remove channels"),
    "two test sets": (arrays(**TESTS), {"test_fraction": 0.2}, "test_fraction must be left out"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_images_get_the_line_that_a_run_gives(write: Write, name: str, tmp_path: Path) -> None:
    content, data, message = BAD[name]
    path = write(content, data=data)
    with pytest.raises(FedsimError) as checked:
        check_data(load_experiment(path))
    assert message in str(checked.value)
    assert "\n" not in str(checked.value)
    with pytest.raises(FedsimError) as ran:
        run_experiment(path, out=tmp_path / "run")
    assert str(ran.value) == str(checked.value)
    assert not (tmp_path / "run" / "experiment.yaml").exists()


@pytest.mark.parametrize(
    "participation",
    [
        {"scheme": "trace", "path": "p.csv"},
        {
            "scheme": "buffered",
            "concurrency": 2,
            "buffer_size": 1,
            "durations": {"path": "p.csv", "column": "round"},
        },
    ],
)
def test_a_file_that_loading_reads_is_in_the_footprint_before_and_after(
    participation: dict[str, Any], write: Write
) -> None:
    """`validate` asks after the file was read, and the policy of a node before."""
    path = write(federation={"rounds": 1, "participation": participation})
    (path.parent / "p.csv").write_text("client,round\n0,1\n1,1\n")
    loaded = load_experiment(path)
    before = LoadedExperiment(read_settings(path), path, path.parent)
    for asked in (loaded, before):
        assert {file.name for file in find_footprint(asked).files} == {"images.npz", "p.csv"}
    federation = loaded.experiment.model_dump()["federation"]
    again = load_experiment(write(federation=federation))  # as a run records it
    assert {file.name for file in find_footprint(again).files} == {"images.npz"}
