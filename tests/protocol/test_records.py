"""A record is found by its name and its type."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsim.protocol.arrays import live_record
from fedsim.protocol.messages import record_of


def test_a_record_of_another_type_or_name_is_not_found() -> None:
    content = RecordDict({"config": ConfigRecord({"n": 1}), "metrics": MetricRecord({"n": 1})})
    found = record_of(content, "config", ConfigRecord)
    assert found is not None
    assert found["n"] == 1
    assert record_of(content, "config", MetricRecord) is None
    assert record_of(content, "arrays", ArrayRecord) is None


def test_a_record_of_live_arrays_is_what_flower_makes_of_its_content() -> None:
    values = {"w": np.ones((2, 3), dtype=np.float32), "b": np.zeros(2)}
    ours = live_record(values)
    theirs = ArrayRecord({name: Array(value) for name, value in values.items()})
    assert ours == theirs
    assert list(ours) == list(theirs)
    assert ArrayRecord(dict(ours)).deflate() == theirs.deflate()
