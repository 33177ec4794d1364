"""Inputs of a trained model: by the constants of its experiment, in the order of its columns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import DataError
from fedsim.data.inputs import Inputs, read_inputs
from fedsim.data.settings import DataSettings

SETTINGS = DataSettings.model_validate(
    {
        "dataset": {
            "path": "train.csv",
            "target": "ill",
            "columns": {
                "age": {"range": [0, 100]},
                "sex": {"classes": ["F", "M"]},
                "id": "drop",
            },
        },
        "partition": {"scheme": "column", "column": "site"},
    }
)
COLUMNS, NAMES = ("age", "sex"), ("no", "yes")


def read(folder: Path, text: str) -> Inputs:
    path = folder / "new.csv"
    path.write_text(text)
    return read_inputs(SETTINGS, path, columns=COLUMNS, class_names=NAMES)


def test_features_follow_the_run_and_other_columns_are_kept(tmp_path: Path) -> None:
    found = read(tmp_path, "sex,id,age\nM,P1,50\nF,P2,20\n")
    assert found.features.tolist() == [[0.5, 0, 1], np.array([0.2, 1, 0], np.float32).tolist()]
    assert found.targets is None
    assert dict(found.kept) == {"id": ["P1", "P2"]}


def test_targets_have_the_classes_of_the_run(tmp_path: Path) -> None:
    found = read(tmp_path, "sex,age,ill\nM,50,yes\nF,20,yes\n")
    assert found.targets is not None
    assert found.targets.tolist() == [1, 1]
    assert read(tmp_path, "sex,age,ill\nM,50,\n").targets is None
    with pytest.raises(DataError, match=r"3: column 'ill': 'maybe' is no class of the model"):
        read(tmp_path, "sex,age,ill\nM,50,yes\nF,20,maybe\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sex,ill\nM,no\n", "no column named 'age'"),
        ("sex,age\nX,5\n", "'X' is not one of the classes"),
        ("sex,age\n", "no rows; add the examples to predict"),
    ],
)
def test_unfit_inputs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)


def test_archives_need_no_targets(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"dataset": "digits"})
    np.savez(tmp_path / "new.npz", x=np.ones((2, 3)))
    found = read_inputs(settings, tmp_path / "new.npz")
    assert found.targets is None
    assert found.features.shape == (2, 3)


def test_text_targets_of_archives_have_the_classes_of_the_run(tmp_path: Path) -> None:
    def targets(*classes: str) -> Any:
        np.savez(tmp_path / "new.npz", x=np.ones((len(classes), 3)), ill=np.array(classes))
        return read_inputs(SETTINGS, tmp_path / "new.npz", class_names=NAMES).targets

    assert targets("yes", "yes").tolist() == [1, 1]
    with pytest.raises(DataError, match=r"new.npz: example 1: column 'ill': 'may' is no class of"):
        targets("no", "may")
    with pytest.raises(DataError, match=r"new.npz: no rows; add the examples to predict"):
        targets()
