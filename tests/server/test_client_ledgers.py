from dataclasses import replace

import pytest

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled, PrivacyLedger
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ProtocolError
from fedsim.server.client_ledgers import ClientLedgers

EVENT = PoissonSampled(0.2, Gaussian(1.0))


def spend(client: int, *charges: tuple[PoissonSampled, int]) -> ClientSpend:
    ledger = PrivacyLedger()
    for event, count in charges:
        ledger.record(event, count)
    return ClientSpend(
        client=client,
        examples=50,
        delta=1e-3,
        noise_multiplier=1.0,
        sampling_rate=0.2,
        target_epsilon=None,
        rounds=len(charges),
        steps=sum(count for _, count in charges),
        round_steps=charges[-1][1] if charges else 0,
        ledger=ledger,
        head="0" * 64,
    )


def test_the_systems_epsilon_is_the_largest() -> None:
    book = ClientLedgers("pld")
    assert book.epsilon_max() is None
    book.record(spend(1, (EVENT, 5)))
    book.record(spend(0, (EVENT, 50)))
    exact = PldAccountant()
    exact.compose(EVENT, 50)
    assert book.epsilon_max() == book.epsilon(0) == exact.get_epsilon(1e-3)
    assert book.epsilon(1) < book.epsilon(0)
    assert list(book.spends) == [0, 1]


def test_a_new_spend_replaces_the_figure() -> None:
    book = ClientLedgers("rdp")
    book.record(spend(0, (EVENT, 5)))
    before = book.epsilon(0)
    book.record(spend(0, (EVENT, 10)))
    assert book.epsilon(0) > before


@pytest.mark.parametrize(
    "shrunk",
    [
        (),
        ((EVENT, 4),),
        ((PoissonSampled(0.2, Gaussian(2.0)), 5),),
        ((PoissonSampled(0.2, Gaussian(2.0)), 1), (EVENT, 5)),
    ],
)
def test_no_client_un_spends(shrunk: tuple) -> None:
    book = ClientLedgers("pld")
    book.record(spend(0, (EVENT, 5)))
    with pytest.raises(ProtocolError, match="does not extend"):
        book.record(spend(0, *shrunk))
    assert book.spends[0].steps == 5


def test_an_extended_ledger_is_taken() -> None:
    book = ClientLedgers("pld")
    book.record(spend(0, (EVENT, 5)))
    other = PoissonSampled(0.1, Gaussian(2.0))
    book.record(spend(0, (EVENT, 7), (other, 3)))
    book.record(replace(spend(0, (EVENT, 7), (other, 4)), rounds=3))
    assert book.spends[0].steps == 11


def test_a_lost_answer_is_looked_up_in_the_ledger() -> None:
    said, ledger = spend(0, (EVENT, 5)), spend(0, (EVENT, 5), (EVENT, 5))
    found = {0: ledger, 1: spend(1)}
    book = ClientLedgers("rdp", recorded=found.__getitem__)
    book.record(said)
    book.look_up(0)
    book.look_up(1)  # never charged
    assert book.spends == {0: ledger}
    found[0] = said  # a copy of the ledger that is behind
    book.look_up(0)
    assert book.spends == {0: ledger}
    book.record(ledger)
    unaware = ClientLedgers("rdp")
    unaware.look_up(0)
    assert unaware.epsilon_max() is None
