"""The wire format: recorded messages stay readable, wrong ones raise a named error."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fedsim.secagg import errors, messages
from fedsim.secagg.additive import leader_share_info, seed_info, split, total_info
from fedsim.secagg.digests import vector_tag
from fedsim.secagg.errors import SecureAggregationError, TooFewClientsError, WireError
from fedsim.secagg.masks import SeedExpander
from fedsim.secagg.messages import CombineRequest, Refusal, RoundOffer, Upload
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.secagg.wire import WIRE_VERSION, from_record, to_record, to_refusal
from fedsim.server.secure.helper import Helper, HelperState

VECTORS = Path(__file__).parent / "vectors"
KINDS = [getattr(messages, name) for name in dir(messages) if name[0].isupper()]
MESSAGES = [kind for kind in KINDS if kind.__module__ == messages.__name__]


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text(), object_hook=_unhex)


def _unhex(value: dict[str, Any]) -> Any:
    if set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    if set(value) == {"ring", "bits"}:
        return np.array(value["ring"], f"u{value['bits'] // 8}")
    return value


GOOD = load("good.json")
BAD = load("bad.json")


@pytest.mark.parametrize("case", GOOD["messages"], ids=lambda case: case["config"]["kind"])
def test_frozen_messages_are_read_and_written_as_ever(case: dict[str, Any]) -> None:
    kind = getattr(messages, case["config"]["kind"])
    message = from_record(kind, case["config"], case["arrays"])
    record = to_record(message)
    assert record.config == case["config"]
    assert list(record.arrays) == list(case["arrays"])
    for name, array in record.arrays.items():
        assert array.dtype == case["arrays"][name].dtype
        np.testing.assert_array_equal(array, case["arrays"][name])


def test_every_kind_of_message_is_frozen() -> None:
    assert {case["config"]["kind"] for case in GOOD["messages"]} == {
        kind.__name__ for kind in MESSAGES
    }


@pytest.mark.parametrize("case", BAD["messages"], ids=lambda case: case["why"])
def test_frozen_bad_messages_are_refused(case: dict[str, Any]) -> None:
    kind = getattr(messages, case["read_as"])
    with pytest.raises(getattr(errors, case["error"])):
        from_record(kind, case["config"], case["arrays"])


def test_a_recorded_round_still_opens_to_the_same_numbers() -> None:
    """Context, key derivation, keystream, envelopes and digests, all at once."""
    recorded = GOOD["round"]
    settings = SecureAggregationSettings.model_validate(recorded["settings"], strict=False)
    offer = from_record(RoundOffer, recorded["offer"], {})
    request = from_record(CombineRequest, recorded["request"], {})
    state = from_record(HelperState, recorded["helper"])
    reply = Helper(helper=1, settings=settings, state=state).combine(request)
    assert reply.released
    np.testing.assert_array_equal(reply.total, recorded["total"])
    assert reply.tag == recorded["tag"] == vector_tag(reply.total, total_info(offer, 1))
    np.testing.assert_array_equal(sum(recorded["shares"], reply.total), recorded["sum"])
    for client, share, tag in zip(
        request.clients, recorded["shares"], recorded["tags"], strict=True
    ):
        assert vector_tag(share, leader_share_info(offer, client)) == tag


def test_a_recorded_seed_still_hides_the_same() -> None:
    recorded = GOOD["round"]
    offer = from_record(RoundOffer, recorded["offer"], {})
    for prg, expected in recorded["masked_by_seed"].items():
        vector = np.arange(5, dtype=np.uint64)
        with patch("fedsim.secagg.additive.new_seed", lambda: bytes(range(32))):
            split(vector, [seed_info(offer, 2, 1)], SeedExpander(prg))
        np.testing.assert_array_equal(vector, expected)


def test_refusals_come_back_as_the_error_they_were() -> None:
    record = to_record(to_refusal(TooFewClientsError("two are left", round_number=3)))
    with pytest.raises(TooFewClientsError, match="round 3: two are left"):
        from_record(Upload, record.config, {})
    assert from_record(Refusal, record.config, {}).error == "TooFewClientsError"
    unknown = {"kind": "Refusal", "version": WIRE_VERSION, "error": "os.system", "message": "x"}
    with pytest.raises(SecureAggregationError) as caught:
        from_record(Upload, unknown, {})
    assert type(caught.value) is SecureAggregationError


def test_flowers_records_carry_every_message() -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord

    for case in GOOD["messages"]:
        config = ConfigRecord(case["config"])
        arrays = ArrayRecord({name: Array(value) for name, value in case["arrays"].items()})
        kind = getattr(messages, case["config"]["kind"])
        values = {name: array.numpy() for name, array in arrays.items()}
        assert to_record(from_record(kind, config, values)).config == case["config"]


def test_lists_of_mixed_types_are_refused() -> None:
    record = to_record(Refusal(error="a", message="b"))
    with pytest.raises(WireError, match=r"Refusal\.message must be str, got int"):
        from_record(Refusal, {**record.config, "message": 3}, {})
