import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import DataError, load_federated_data
from fedsim.data.builtin.heart_disease import FILE, load_heart_disease
from fedsim.data.catalog import HeartDiseaseArgs
from fedsim.data.load import ExampleGroups, FederatedData
from fedsim.data.settings import DataSettings

UCI = {"Cleveland": 303, "Hungary": 294, "Switzerland": 123, "VA Long Beach": 200}
FLAMBY = {"Cleveland": 303, "Hungary": 261, "Switzerland": 46, "VA Long Beach": 130}


@pytest.mark.parametrize(("rows", "counts"), [("all", UCI), ("complete", FLAMBY)])
def test_each_hospital_has_its_published_patients(rows: Any, counts: dict[str, int]) -> None:
    data = load_heart_disease(HeartDiseaseArgs(rows=rows))
    assert Counter(data.groups["hospital"]) == counts
    assert data.class_names == ("healthy", "ill")
    assert np.array_equal(np.unique(data.train.targets), [0, 1])
    assert data.train.features.min() == 0
    assert data.train.features.max() == 1


def test_the_file_has_one_patient_of_hungary_under_cleveland() -> None:
    text = FILE.read("heart_disease").decode()
    rows = list(csv.DictReader(text.splitlines()))
    assert Counter(row["dataset"] for row in rows) == UCI | {"Cleveland": 304, "Hungary": 293}
    gaps = [
        row["id"]
        for row in rows
        if row["dataset"] == "Cleveland" and not row["slope"] + row["thal"]
    ]
    assert gaps == ["304"]  # nobody else of Cleveland lacks both, as many of Hungary do


def test_published_numbers_are_kept_on_request() -> None:
    first = load_heart_disease(HeartDiseaseArgs(scaled=False)).train
    # age, sex, pressure, cholesterol, sugar, rate, angina, depression, then indicators
    assert first.features[0].tolist() == pytest.approx(
        [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1, 0]
    )


def test_gaps_are_the_same_public_constants_in_every_row() -> None:
    data = load_heart_disease(HeartDiseaseArgs(rows="all"))
    switzerland = np.array(data.groups["hospital"]) == "Switzerland"
    cholesterol, is_unknown = data.train.features[switzerland][:, 3], data.train.features[:, 18]
    assert (cholesterol == 0.5).all()  # nobody measured it there, and the file says 0
    assert (is_unknown[switzerland] == 1).all()


def hospitals(**changes: Any) -> FederatedData:
    settings = {"dataset": "heart_disease", "partition": {"scheme": "column", "column": "hospital"}}
    return load_federated_data(
        DataSettings.model_validate({**settings, **changes}), seed=3, base=Path(), group="hospital"
    )


def test_the_public_test_set_keeps_the_hospital_of_each_patient() -> None:
    data = hospitals()
    assert data.client_names == tuple(FLAMBY)
    assert data.test_groups is not None
    held_out = Counter(data.test_groups.names)
    trained = dict(zip(FLAMBY, data.clients.sizes, strict=True))
    assert {name: held_out[name] + trained[name] for name in FLAMBY} == FLAMBY
    rows = np.array([5, 2])
    assert data.with_test(rows).test_groups == ExampleGroups(
        "hospital", (data.test_groups.names[5], data.test_groups.names[2])
    )
    pooled = hospitals(partition={"scheme": "iid", "num_clients": 1})
    assert pooled.test_groups == data.test_groups


def test_groups_of_another_column_or_of_a_test_set_of_its_own_are_refused(tmp_path: Path) -> None:
    settings = {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}}
    with pytest.raises(DataError, match="no column 'hospital' that names groups; it has none"):
        load_federated_data(
            DataSettings.model_validate(settings), seed=0, base=tmp_path, group="hospital"
        )
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=[0, 1, 0, 1], x_test=np.eye(4), y_test=[0, 1, 0, 1])
    settings["dataset"] = {"path": "a.npz", "target": "y"}
    with pytest.raises(DataError, match="brings a test set of its own"):
        load_federated_data(
            DataSettings.model_validate(settings), seed=0, base=tmp_path, group="hospital"
        )
