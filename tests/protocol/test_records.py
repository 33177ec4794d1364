"""Records that are filled at once are Flower's own, and refuse what Flower refuses."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsim.protocol.live_arrays import LiveArray
from fedsim.protocol.records import array_record, config_record, metric_record, record_dict

ARRAYS = {"w": Array(np.ones((2, 3), dtype=np.float32)), "b": LiveArray(np.zeros(2))}
FIELDS: dict[str, Any] = {"n": 3, "x": 0.5, "name": "é", "raw": b"\0", "yes": True, "many": [1, 2]}


def set_one_by_one(arrays: dict[str, Array]) -> ArrayRecord:
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record


# (made by fedsim, made by Flower)
PAIRS = {
    "settings": (config_record(FIELDS), ConfigRecord(dict(FIELDS))),
    "scalars": (config_record({"n": 3, "head": "a"}), ConfigRecord({"n": 3, "head": "a"})),
    "numbers": (metric_record({"n": 3, "x": 0.5}), MetricRecord({"n": 3, "x": 0.5})),
    "arrays": (array_record(ARRAYS), set_one_by_one(ARRAYS)),
    "nothing": (config_record({}), ConfigRecord()),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_record_is_what_flower_makes_of_its_content(name: str) -> None:
    ours, theirs = PAIRS[name]
    assert type(ours) is type(theirs)
    assert ours == theirs
    assert list(ours) == list(theirs)
    assert vars(ours).keys() >= vars(theirs).keys() - {"_is_dirty"}
    assert ours.deflate() == theirs.deflate()


def test_a_record_dict_is_what_flower_makes_of_its_records() -> None:
    records = {"config": config_record({"round": 1}), "arrays": array_record(ARRAYS)}
    ours, theirs = record_dict(records), RecordDict(dict(records))
    assert ours == theirs
    assert list(ours) == list(theirs)
    assert list(ours.config_records) == ["config"]
    assert ours.object_id == theirs.object_id


def test_a_record_can_be_changed_afterwards_and_takes_nothing_from_its_source() -> None:
    fields = {"n": 1}
    record = config_record(fields)
    record["n"] = 2
    record["more"] = "text"
    assert fields == {"n": 1}
    assert dict(record) == {"n": 2, "more": "text"}
    with pytest.raises(TypeError):
        record["bad"] = object()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "content"),
    [
        (config_record, {"good": 1, "bad": object()}),
        (config_record, {"mixed": [1, "a"]}),
        (config_record, {"none": None}),
        (metric_record, {"text": "a"}),
        (array_record, {"array": np.zeros(2)}),
        (record_dict, {"record": {"n": 1}}),
    ],
)
def test_what_flower_refuses_is_refused(make: Any, content: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        make(content)


def test_values_of_derived_types_are_left_to_flower() -> None:
    assert dict(metric_record({"x": np.float64(0.5)})) == {"x": 0.5}
