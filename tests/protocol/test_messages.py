import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedsim.accountant import Gaussian, PoissonSampled, PrivacyLedger
from fedsim.protocol.arrays import digest, is_live, live_record, to_arrays, to_numpy
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    PRIVACY,
    SECAGG_ARRAYS,
    TrainReply,
    TrainRequest,
    Withdrawal,
    record_of,
)
from fedsim.protocol.secure import from_records, to_records
from fedsim.secagg.errors import WireError
from fedsim.secagg.messages import CombineReply


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with server_identity(1):
        yield


def spend() -> ClientSpend:
    ledger = PrivacyLedger()
    ledger.record(PoissonSampled(0.25, Gaussian(1.5)), 10)
    return ClientSpend(
        client=3,
        examples=80,
        delta=1e-3,
        noise_multiplier=1.5,
        sampling_rate=0.25,
        target_epsilon=None,
        rounds=2,
        steps=20,
        round_steps=10,
        ledger=ledger,
        head="a" * 64,
    )


ARRAYS_VALUE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}


def test_what_an_algorithm_sends_travels_beside_the_model() -> None:
    arrays = to_arrays({"w": np.arange(3.0)})
    sent = {"correction": to_arrays({"w": np.full(3, 0.25)})}
    asked = TrainRequest(2, arrays, sent=sent).to_message(1)
    found = TrainRequest.from_message(asked)
    assert found.round_number == 2
    assert digest(found.arrays) == digest(arrays)
    assert {name: digest(one) for name, one in found.sent.items()} == {
        "correction": digest(sent["correction"])
    }
    reply = TrainReply(to_numpy(arrays), 4, None, numbers={"loss": 0.125}).to_message(asked)
    assert TrainReply.from_message(reply).numbers == {"loss": 0.125}


def test_a_learnt_bound_travels_both_ways_to_the_bit() -> None:
    bound = 0.1 + 0.2
    request = TrainRequest(4, to_arrays(ARRAYS_VALUE), clip_norm=bound).to_message(1001)
    assert TrainRequest.from_message(request).clip_norm == bound
    reply = TrainReply(ARRAYS_VALUE, 80, spend(), clip_norm=bound)
    assert TrainReply.from_message(reply.to_message(request)).clip_norm == bound
    without = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    assert TrainRequest.from_message(without).clip_norm is None


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1, "1"])
def test_a_bound_that_is_no_positive_number_is_refused(bound: Any) -> None:
    message = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    message.content[CONFIG] = ConfigRecord({"server-round": 4, "clip-norm": bound})
    with pytest.raises(ProtocolError, match="clip-norm must be a finite number > 0"):
        TrainRequest.from_message(message)
    reply = TrainReply(ARRAYS_VALUE, 80, spend()).to_message(message)
    reply.content["learnt"] = ConfigRecord({"clip-norm": bound})
    with pytest.raises(ProtocolError, match="clip-norm must be a finite number > 0"):
        TrainReply.from_message(reply)


@pytest.mark.parametrize("private", [True, False])
def test_reply_round_trip(private: bool) -> None:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    sent = TrainReply(ARRAYS_VALUE, 80, spend() if private else None)
    reply = TrainReply.from_message(sent.to_message(request))
    assert reply.examples == 80
    assert reply.spend == sent.spend


def test_reply_suits_flowers_own_strategies() -> None:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    content = TrainReply(ARRAYS_VALUE, 80, spend()).to_message(request).content
    assert list(content.array_records) == [ARRAYS]
    assert dict(content.metric_records[METRICS]) == {"num-examples": 80}


@pytest.mark.parametrize("pack", [live_record, to_arrays])
def test_a_reply_has_its_arrays_in_memory_as_its_request(pack: Any) -> None:
    request = TrainRequest(1, pack(ARRAYS_VALUE)).to_message(1001)
    content = TrainReply(ARRAYS_VALUE, 80, None).to_message(request).content
    assert is_live(content.array_records[ARRAYS]) == (pack is live_record)


def test_withdrawal_round_trip() -> None:
    request = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    withdrawal = Withdrawal(3, "its budget is spent")
    assert Withdrawal.from_message(withdrawal.to_message(request)) == withdrawal
    reply = TrainReply(ARRAYS_VALUE, 80, spend()).to_message(request)
    assert Withdrawal.from_message(reply) is None


def test_a_malformed_withdrawal_is_refused() -> None:
    request = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    message = Withdrawal(3, "spent").to_message(request)
    message.content["withdrawal"] = ConfigRecord({"client": "three"})
    with pytest.raises(ProtocolError, match="malformed withdrawal: client 'three'"):
        Withdrawal.from_message(message)


def broken(name: str) -> RecordDict:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    content = TrainReply(ARRAYS_VALUE, 80, spend()).to_message(request).content
    if name == "negative examples":
        content[METRICS] = MetricRecord({"num-examples": -1})
    elif name == "ledger":
        content[PRIVACY] = ConfigRecord({**dict(content.config_records[PRIVACY]), "ledger": "[{]"})
    elif name == "no delta":
        record = dict(content.config_records[PRIVACY])
        del record["delta"]
        content[PRIVACY] = ConfigRecord(record)
    elif name != "nothing":
        del content[name]
    return content


@pytest.mark.parametrize("name", [ARRAYS, METRICS, "negative examples", "ledger", "no delta"])
def test_malformed_replies_are_refused(name: str) -> None:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    with pytest.raises(ProtocolError):
        TrainReply.from_message(Message(broken(name), reply_to=request))


HUGE = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1%s,), }"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no array",
        b"PK\x03\x04 an archive",
        Array(np.array(["text"])).data,
        (HUGE % (b"0" * 18)).ljust(127) + b"\n",
    ],
    ids=["empty", "other", "archive", "text", "huge"],
)
def test_bytes_that_are_no_array_are_a_failure_of_their_sender(data: bytes) -> None:
    """The server names the sender as failed for a `ProtocolError`; others would end the run."""
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    reply = CombineReply(helper=1, round_nonce=b"n" * 16, released=False)
    content, sealed = broken("nothing"), to_records(reply)
    forged = ArrayRecord({"w": Array("float32", (2, 3), "numpy.ndarray", data)})
    content[ARRAYS] = forged
    with pytest.raises(ProtocolError, match="array 'w' cannot be read"):
        TrainReply.from_message(Message(content, reply_to=request))
    with pytest.raises(WireError, match="array 'w' cannot be read"):
        from_records(CombineReply, RecordDict({**sealed, SECAGG_ARRAYS: forged}))


def test_malformed_requests_are_refused() -> None:
    message = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    message.content[CONFIG] = ConfigRecord({"server-round": 0})
    with pytest.raises(ProtocolError, match="server-round must be"):
        TrainRequest.from_message(message)
    del message.content[CONFIG]
    with pytest.raises(ProtocolError, match="needs the records"):
        TrainRequest.from_message(message)


def test_a_record_of_another_type_or_name_is_not_found() -> None:
    content = RecordDict({"config": ConfigRecord({"n": 1}), "metrics": MetricRecord({"n": 1})})
    found = record_of(content, "config", ConfigRecord)
    assert found is not None
    assert found["n"] == 1
    assert record_of(content, "config", MetricRecord) is None
    assert record_of(content, "arrays", ArrayRecord) is None
