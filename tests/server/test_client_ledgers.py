from dataclasses import replace
from types import ModuleType

import pytest

from fedsim.accountant import (
    ZCDP,
    EpochShuffled,
    Event,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    PldAccountant,
    PoissonSampled,
    PrivacyLedger,
    RandomAllocation,
    calibrate_noise_multiplier,
)
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.composition import SampledGaussian
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import epsilon_with_slack, target_without_slack
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
    assert book.epsilon_max() == book.epsilons()[0] == epsilon_with_slack(exact.get_epsilon, 1e-3)
    assert book.epsilons()[1] < book.epsilons()[0]
    assert list(book.spends) == [0, 1]


def test_an_epsilon_of_zero_has_the_slack_of_the_sampler() -> None:
    """At a large δ the accountants' ε is 0, and the noise is not exactly Gaussian."""
    book = ClientLedgers("pld")
    book.record(replace(spend(0, (EVENT, 1)), delta=0.5))
    exact = PldAccountant()
    exact.compose(EVENT, 1)
    assert exact.get_epsilon(0.5) == 0.0
    assert book.epsilon_max() == book.epsilons()[0] > 0.0
    assert book.epsilon_max() == epsilon_with_slack(exact.get_epsilon, 0.5)


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


def test_no_client_un_spends_against_the_server() -> None:
    own = PrivacyLedger().record(PoissonSampled(0.1, Gaussian(0.5)), 5)
    ledgers = ClientLedgers("pld")
    ledgers.record(replace(spend(0, (EVENT, 5)), against_server=own))
    milder = PrivacyLedger().record(PoissonSampled(0.1, Gaussian(5.0)), 10)
    for second in (None, PrivacyLedger(), milder):
        with pytest.raises(ProtocolError, match="does not extend its previous one"):
            ledgers.record(replace(spend(0, (EVENT, 10)), against_server=second))
    assert ledgers.spends[0].against_server == own
    more = PrivacyLedger().merge(own).merge(own)
    ledgers.record(replace(spend(0, (EVENT, 10)), against_server=more))
    assert ledgers.spends[0].against_server == more


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


def many_sizes(accountant: AccountantName, target: float | None) -> dict[int, ClientSpend]:
    """Return clients of different sizes, δ and noise, calibrated to the target if there is one."""
    spends = {}
    for client in range(12):
        rate, delta = 0.05 + 0.02 * client, (1e-3, 1e-5)[client % 2]
        noise = 0.8 + 0.1 * client
        if target is not None:
            inner_epsilon, inner_delta = target_without_slack(target, delta)
            noise = calibrate_noise_multiplier(
                target_epsilon=inner_epsilon,
                delta=inner_delta,
                sampling_rate=rate,
                steps=40,
                accountant=accountant,
            )
        charged = spend(client, (PoissonSampled(rate, Gaussian(noise)), 40))
        spends[client] = replace(charged, delta=delta, target_epsilon=target)
    return spends


@pytest.mark.parametrize("accountant", ["pld", "rdp", "moments"])
@pytest.mark.parametrize("target", [None, 4.0])
def test_every_epsilon_is_that_of_the_clients_own_accountant(
    accountant: AccountantName, target: float | None, saddle_point: ModuleType
) -> None:
    """Never below what the exact composition costs, at most 2e-4 off, never above its target."""
    ledgers = ClientLedgers(accountant)
    spends = many_sizes(accountant, target)
    for one in spends.values():
        ledgers.record(one)
    own = {c: one.ledger.epsilon_with_slack(one.delta, accountant) for c, one in spends.items()}
    found = ledgers.epsilons()
    for client, one in spends.items():
        assert found[client] == pytest.approx(own[client], abs=2e-4)
        if accountant == "pld":
            events = {SampledGaussian(*_terms(one)): 40}
            assert found[client] >= saddle_point.near_exact_epsilon(events, one.delta)
        assert target is None or found[client] <= target
    assert ledgers.epsilon_max() == max(found.values())
    assert max(found.values()) == own[max(found, key=found.__getitem__)]


def _terms(one: ClientSpend) -> tuple[float, float]:
    event = one.ledger.entries[0][0]
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, Gaussian)
    return event.sampling_rate, event.event.noise_multiplier


@pytest.mark.parametrize(
    ("adjacency", "event"),
    [
        ("zero_out", EpochShuffled(4, Gaussian(3.0))),
        ("zero_out", RandomAllocation(8, Gaussian(2.0))),
        ("zero_out", ZCDP(0.01)),
        ("zero_out", PoissonSampled(0.1, JointGaussian((2.0, 5.0)))),
        ("replace_one", FixedSizeSampled(100, 10, Gaussian(2.0))),
    ],
)
def test_a_ledger_that_grows_round_by_round_costs_what_it_costs_at_once(
    adjacency: Adjacency, event: Event
) -> None:
    ledgers = ClientLedgers("pld", adjacency)
    ledger = PrivacyLedger()
    for number in range(1, 4):
        ledger = PrivacyLedger().merge(ledger).record(event, number)
        ledgers.record(replace(spend(0), ledger=ledger, rounds=number))
        ledgers.record(replace(spend(1), ledger=PrivacyLedger().record(event, 1), rounds=1))
        assert ledgers.epsilon_max() == ledger.epsilon_with_slack(1e-3, "pld", adjacency)
        assert ledgers.epsilons()[1] == pytest.approx(
            PrivacyLedger().record(event, 1).epsilon(1e-3, "pld", adjacency), abs=2e-4
        )


def test_an_event_without_a_rule_is_refused_and_nothing_recorded() -> None:
    ledgers = ClientLedgers("pld", "add_remove")
    ledgers.record(spend(0, (EVENT, 5)))
    bad = PrivacyLedger().record(EVENT, 6).record(EpochShuffled(4, Gaussian(1.0)))
    before = ledgers.epsilons()
    with pytest.raises(ProtocolError, match="not supported under add_remove"):
        ledgers.record(replace(spend(0), ledger=bad))
    assert ledgers.epsilons() == before
    assert ledgers.spends[0].steps == 5
