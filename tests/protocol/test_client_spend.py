"""The record of a client's spend adds charges up and survives the wire."""

from dataclasses import replace

import pytest
from flwr.app import ConfigRecord

from fedsim.accountant import Gaussian, PoissonSampled, PrivacyLedger
from fedsim.accountant.ledger.journal import Charge, JournalError
from fedsim.core.durable import GENESIS
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError

EVENT = PoissonSampled(0.25, Gaussian(1.5))
NOTHING = ClientSpend(
    client=3,
    examples=80,
    delta=1e-3,
    noise_multiplier=1.5,
    sampling_rate=0.25,
    target_epsilon=None,
    rounds=0,
    steps=0,
    round_steps=0,
    ledger=PrivacyLedger(),
    head=GENESIS,
)


def charges(*steps: int) -> tuple[Charge, ...]:
    made: list[Charge] = []
    for number, count in enumerate(steps, start=1):
        ledger = PrivacyLedger().record(EVENT, count)
        made.append(Charge(3, number, "model", count, ledger, made[-1].hash if made else GENESIS))
    return tuple(made)


def test_charges_add_up_at_once_or_one_after_another() -> None:
    made = charges(5, 2, 3)
    spend = NOTHING.after(made)
    assert (spend.rounds, spend.steps, spend.round_steps) == (3, 10, 3)
    assert spend.ledger.entries == ((EVENT, 10),)
    assert spend.head == made[-1].hash
    assert spend == NOTHING.after(made[:1]).after(made[1:])
    assert NOTHING.after(()) == NOTHING
    assert NOTHING.ledger.entries == ()


def test_charges_against_the_server_add_up_beside_the_claimed_ones() -> None:
    own = PoissonSampled(0.25, Gaussian(0.5))
    made = [replace(c, against_server=PrivacyLedger().record(own, c.steps)) for c in charges(5, 2)]
    spend = NOTHING.after(made)
    assert spend.against_server is not None
    assert spend.against_server.entries == ((own, 7),)
    assert spend.ledger.entries == ((EVENT, 7),)
    assert spend == NOTHING.after(made[:1]).after(made[1:])
    assert ClientSpend.from_record(spend.to_record()) == spend
    assert NOTHING.after(charges(5)).against_server is None


def test_a_client_does_not_change_its_trust_model() -> None:
    plain = charges(5, 2)
    second = replace(plain[1], against_server=PrivacyLedger().record(EVENT, 2))
    for first, then in ((plain[0], second), (second, plain[0])):
        with pytest.raises(JournalError, match="client 3: its records are of two trust models"):
            NOTHING.after((first,)).after((then,))


@pytest.mark.parametrize("target", [None, 8.0])
def test_the_record_round_trips(target: float | None) -> None:
    spend = ClientSpend(**{**vars(NOTHING.after(charges(5))), "target_epsilon": target})
    record = spend.to_record()
    assert ClientSpend.from_record(record) == spend
    assert ("target-epsilon" in record) == (target is not None)


def test_a_record_without_a_field_is_refused() -> None:
    record = NOTHING.to_record()
    for name in record:
        fields = {key: value for key, value in record.items() if key != name}
        with pytest.raises(ProtocolError, match="malformed record of a client's spend"):
            ClientSpend.from_record(ConfigRecord(fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("delta", delta) for delta in (-1.0, 0.0, 1.0, float("nan"))),
        ("examples", float("inf")),
        ("ledger", "[" * 100_000),
        ("ledger", PrivacyLedger().record(EVENT, 10**400).to_text()),
    ],
)
def test_a_client_cannot_end_the_run_by_its_record(name: str, value: str | float) -> None:
    """The server takes a `ProtocolError` for a failure of the client; others would end the run."""
    with pytest.raises(ProtocolError):
        ClientSpend.from_record(ConfigRecord({**NOTHING.to_record(), name: value}))
