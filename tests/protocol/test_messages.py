import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedsim.accountant import Gaussian, PoissonSampled, PrivacyLedger
from fedsim.protocol.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    PRIVACY,
    NodeIdentity,
    PrivacyStatement,
    ProtocolError,
    TrainReply,
    TrainRequest,
    Withdrawal,
    digest,
    identity_of,
    roll_call_message,
    roll_call_reply,
    to_arrays,
    to_numpy,
)
from fedsim.simulation.flower_internals import server_identity


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with server_identity(1):
        yield


def statement() -> PrivacyStatement:
    ledger = PrivacyLedger()
    ledger.record(PoissonSampled(0.25, Gaussian(1.5)), 10)
    return PrivacyStatement(
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


def test_request_round_trip() -> None:
    message = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    request = TrainRequest.from_message(message)
    assert request.round_number == 4
    np.testing.assert_array_equal(to_numpy(request.arrays)["w"], ARRAYS_VALUE["w"])


def test_a_learnt_bound_travels_both_ways_to_the_bit() -> None:
    bound = 0.1 + 0.2
    request = TrainRequest(4, to_arrays(ARRAYS_VALUE), clip_norm=bound).to_message(1001)
    assert TrainRequest.from_message(request).clip_norm == bound
    reply = TrainReply(to_arrays(ARRAYS_VALUE), 80, statement(), clip_norm=bound)
    assert TrainReply.from_message(reply.to_message(request)).clip_norm == bound
    without = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    assert TrainRequest.from_message(without).clip_norm is None


def test_requests_with_other_bounds_are_other_requests() -> None:
    arrays = to_arrays(ARRAYS_VALUE)
    bounds = (None, 1.0, 1.0 + 2.0**-52, 2.0)
    identities = [TrainRequest(4, arrays, clip_norm=bound).identity("model") for bound in bounds]
    assert len(set(identities)) == 4
    assert identities[0] == "model"
    assert identities[1] == TrainRequest(4, arrays, clip_norm=1.0).identity("model")


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1, "1"])
def test_a_bound_that_is_no_positive_number_is_refused(bound: Any) -> None:
    message = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    message.content[CONFIG] = ConfigRecord({"server-round": 4, "clip-norm": bound})
    with pytest.raises(ProtocolError, match="clip-norm must be a finite number > 0"):
        TrainRequest.from_message(message)
    reply = TrainReply(to_arrays(ARRAYS_VALUE), 80, statement()).to_message(message)
    reply.content["learnt"] = ConfigRecord({"clip-norm": bound})
    with pytest.raises(ProtocolError, match="clip-norm must be a finite number > 0"):
        TrainReply.from_message(reply)


@pytest.mark.parametrize("private", [True, False])
def test_reply_round_trip(private: bool) -> None:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    sent = TrainReply(to_arrays(ARRAYS_VALUE), 80, statement() if private else None)
    reply = TrainReply.from_message(sent.to_message(request))
    assert reply.examples == 80
    assert reply.privacy == sent.privacy


def test_reply_suits_flowers_own_strategies() -> None:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    content = TrainReply(to_arrays(ARRAYS_VALUE), 80, statement()).to_message(request).content
    assert list(content.array_records) == [ARRAYS]
    assert dict(content.metric_records[METRICS]) == {"num-examples": 80}


def test_withdrawal_round_trip() -> None:
    request = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    withdrawal = Withdrawal(3, "its budget is spent")
    assert Withdrawal.from_message(withdrawal.to_message(request)) == withdrawal
    reply = TrainReply(to_arrays(ARRAYS_VALUE), 80, statement()).to_message(request)
    assert Withdrawal.from_message(reply) is None


def test_a_malformed_withdrawal_is_refused() -> None:
    request = TrainRequest(4, to_arrays(ARRAYS_VALUE)).to_message(1001)
    message = Withdrawal(3, "spent").to_message(request)
    message.content["withdrawal"] = ConfigRecord({"client": "three"})
    with pytest.raises(ProtocolError, match="malformed withdrawal: client 'three'"):
        Withdrawal.from_message(message)


def broken(name: str) -> RecordDict:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    content = TrainReply(to_arrays(ARRAYS_VALUE), 80, statement()).to_message(request).content
    if name == "negative examples":
        content[METRICS] = MetricRecord({"num-examples": -1})
    elif name == "ledger":
        content[PRIVACY] = ConfigRecord({**dict(content.config_records[PRIVACY]), "ledger": "[{]"})
    elif name == "no delta":
        record = dict(content.config_records[PRIVACY])
        del record["delta"]
        content[PRIVACY] = ConfigRecord(record)
    else:
        del content[name]
    return content


@pytest.mark.parametrize("name", [ARRAYS, METRICS, "negative examples", "ledger", "no delta"])
def test_malformed_replies_are_refused(name: str) -> None:
    request = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    with pytest.raises(ProtocolError):
        TrainReply.from_message(Message(broken(name), reply_to=request))


def test_malformed_requests_are_refused() -> None:
    message = TrainRequest(1, to_arrays(ARRAYS_VALUE)).to_message(1001)
    message.content[CONFIG] = ConfigRecord({"server-round": 0})
    with pytest.raises(ProtocolError, match="server-round must be"):
        TrainRequest.from_message(message)
    del message.content[CONFIG]
    with pytest.raises(ProtocolError, match="needs the records"):
        TrainRequest.from_message(message)


@pytest.mark.parametrize("identity", [NodeIdentity(6), NodeIdentity(0), NodeIdentity(1, "helper")])
def test_roll_call_tells_who_a_node_is(identity: NodeIdentity) -> None:
    request = roll_call_message(1001)
    assert identity_of(roll_call_reply(identity, request)) == identity
    with pytest.raises(ProtocolError, match="did not say which client or helper"):
        identity_of(Message(RecordDict(), reply_to=request))
    reply = roll_call_reply(identity, request)
    reply.content.config_records["identity"]["role"] = "spy"
    with pytest.raises(ProtocolError, match="role 'spy'"):
        identity_of(reply)


def test_digest_tells_models_apart() -> None:
    base = digest(to_arrays(ARRAYS_VALUE))
    assert base == digest(to_arrays({k: v.copy() for k, v in ARRAYS_VALUE.items()}))
    changed = {**ARRAYS_VALUE, "w": np.nextafter(ARRAYS_VALUE["w"], np.float32(9))}
    assert digest(to_arrays(changed)) != base
    assert digest(to_arrays({"v": ARRAYS_VALUE["w"], "n": ARRAYS_VALUE["n"]})) != base
    assert digest(to_arrays({**ARRAYS_VALUE, "w": ARRAYS_VALUE["w"].reshape(3, 2)})) != base
