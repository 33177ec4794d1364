from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import RecordDict

from fedsim.accountant import Gaussian, PrivacyLedger
from fedsim.accountant.ledger.journal import FileJournal, Journal
from fedsim.clients.account import ChargeRefusedError, ClientBudgetExhaustedError, PrivacyAccount
from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.sampling.divided_batches import ShuffledEpochs
from fedsim.clients.sampling.sampling import Charges, PoissonSampling

PLAN = PrivacyPlan(
    release=DpSgdMechanism(PoissonSampling(0.2), FlatClipping(1.0), 1.1, 10.0),
    examples=50,
    delta=1e-3,
    target_epsilon=8.0,
    planned_steps=15,
    affordable_steps=15,
)


def charge(
    state: RecordDict,
    journal: Journal | None,
    round_number: int,
    request: str = "model",
    plan: PrivacyPlan = PLAN,
) -> PrivacyAccount:
    account = PrivacyAccount.restore(state, plan, client=3, journal=journal)
    proposed = account.propose(round_number=round_number, request=request, steps=5)
    if proposed is None:
        return account
    if journal is not None:
        journal.append_all([proposed])
    return account.commit(proposed, state)


def ledger_of(steps: int) -> PrivacyLedger:
    ledger = PrivacyLedger()
    ledger.record(PLAN.release_as(DpSgdMechanism).event, steps)
    return ledger


@pytest.mark.parametrize("durable", [True, False])
def test_spend_is_cumulative_over_rounds(tmp_path: Path, durable: bool) -> None:
    state, journal = RecordDict(), FileJournal(tmp_path / "ledger.jsonl") if durable else None
    for number, round_number in enumerate((1, 2, 7), start=1):
        account = charge(state, journal, round_number)
        assert account.spend.rounds == number
        assert account.spend.ledger == ledger_of(5 * number)
        assert account.spend.steps == 5 * number


def test_a_state_lost_after_the_charge_catches_up_with_the_journal(tmp_path: Path) -> None:
    """Flower throws a client's state away when it raises; what was charged stays charged."""
    path = tmp_path / "ledger.jsonl"
    kept = RecordDict()
    charge(kept, FileJournal(path), 1)
    charge(RecordDict({name: kept[name] for name in kept}), FileJournal(path), 2)
    account = PrivacyAccount.restore(kept, PLAN, client=3, journal=FileJournal(path))
    assert account.last_round == 2
    assert account.spend.ledger == ledger_of(10)


class TwoViews(PrivacyPlan):
    """A plan with a second charge, against whoever sees the client's own uploads."""

    def server_charges(self, first_step: int, steps: int) -> Charges | None:
        return [(Gaussian(0.5), steps)]


@pytest.mark.parametrize("durable", [True, False])
def test_both_ledgers_are_charged_before_a_release(tmp_path: Path, durable: bool) -> None:
    state, path = RecordDict(), tmp_path / "ledger.jsonl"
    plan = TwoViews(**vars(PLAN))
    journal = FileJournal(path) if durable else None
    charge(state, journal, 1, plan=plan)
    kept = RecordDict({name: state[name] for name in state})
    charge(kept, journal, 2, plan=plan)
    account = PrivacyAccount.restore(state if durable else kept, plan, client=3, journal=journal)
    assert account.spend.ledger == ledger_of(10)
    assert account.spend.against_server is not None
    assert account.spend.against_server.entries == ((Gaussian(0.5), 10),)
    if durable:
        second = [one.against_server for one in FileJournal(path).history(3)]
        assert [one.entries for one in second if one is not None] == [((Gaussian(0.5), 5),)] * 2


@pytest.mark.parametrize("durable", [True, False])
def test_the_same_request_again_costs_nothing_more(tmp_path: Path, durable: bool) -> None:
    state, journal = RecordDict(), FileJournal(tmp_path / "ledger.jsonl") if durable else None
    first = charge(state, journal, 1)
    assert charge(state, journal, 1) == first


def test_another_request_for_an_answered_round_is_refused(tmp_path: Path) -> None:
    """Noise is keyed by the round: answering twice would release the difference without noise."""
    state, journal = RecordDict(), FileJournal(tmp_path / "ledger.jsonl")
    charge(state, journal, 1)
    charge(state, journal, 2)
    for round_number, request in ((2, "another model"), (1, "model")):
        with pytest.raises(ChargeRefusedError, match="would reuse its noise"):
            charge(state, journal, round_number, request)
    assert PrivacyAccount.restore(state, PLAN, client=3, journal=journal).spend.ledger == ledger_of(
        10
    )


def test_more_steps_than_the_target_affords_are_refused() -> None:
    state = RecordDict()
    for round_number in (1, 2, 3):
        charge(state, None, round_number)
    with pytest.raises(
        ClientBudgetExhaustedError, match=r"target ε = 8 .* affords 15 steps, and 15 are"
    ):
        charge(state, None, 4)
    assert PrivacyAccount.restore(state, PLAN, client=3, journal=None).spend.ledger == ledger_of(15)


@pytest.mark.parametrize("durable", [True, False])
def test_the_last_round_takes_the_steps_that_are_left(tmp_path: Path, durable: bool) -> None:
    plan = replace(PLAN, affordable_steps=12)
    state, journal = RecordDict(), FileJournal(tmp_path / "ledger.jsonl") if durable else None
    taken = [charge(state, journal, number, plan=plan).spend.round_steps for number in (1, 2, 3)]
    assert taken == [5, 5, 2]
    assert charge(state, journal, 3, plan=plan).spend.round_steps == 2  # asked again, as before
    account = PrivacyAccount.restore(state, plan, client=3, journal=journal)
    assert (account.spend.steps, account.spend.ledger) == (12, ledger_of(12))
    with pytest.raises(ClientBudgetExhaustedError, match="12 are taken"):
        charge(state, journal, 4, plan=plan)


@pytest.mark.parametrize("durable", [True, False])
def test_shuffled_data_is_charged_when_an_epoch_starts(tmp_path: Path, durable: bool) -> None:
    """Epochs of 4 batches, rounds of 5 steps: 2, 1 and 1 epochs start, then budget for 15 steps."""
    step = replace(PLAN.release_as(DpSgdMechanism), sampling=ShuffledEpochs(4))
    plan = replace(PLAN, release=step)
    state, journal = RecordDict(), FileJournal(tmp_path / "ledger.jsonl") if durable else None
    for round_number, epochs in ((1, 2), (2, 3), (6, 4)):
        account = charge(state, journal, round_number, plan=plan)
        assert account.spend.ledger.entries == ((step.event, epochs),)
    with pytest.raises(ClientBudgetExhaustedError, match="15 are taken"):
        charge(state, journal, 7, plan=plan)


def test_a_round_within_an_epoch_costs_nothing_and_is_recorded(tmp_path: Path) -> None:
    step = replace(PLAN.release_as(DpSgdMechanism), sampling=ShuffledEpochs(100))
    plan = replace(PLAN, release=step, target_epsilon=None, affordable_steps=None)
    path = tmp_path / "ledger.jsonl"
    for round_number in (1, 2, 3):
        account = charge(RecordDict(), FileJournal(path), round_number, plan=plan)
    assert account.spend.ledger.entries == ((step.event, 1),)
    history = FileJournal(path).history(3)
    assert [len(one.ledger) for one in history] == [1, 0, 0]
    assert account.spend.rounds == 3


def test_secure_noise_is_charged_for_every_answer() -> None:
    """It cannot give the same answer twice, so the same request again is a second release."""
    plan, state = replace(PLAN, secure_noise=True), RecordDict()
    charge(state, None, 1, plan=plan)
    account = charge(state, None, 1, plan=plan)
    assert account.spend.ledger == ledger_of(10)
    account = charge(state, None, 1, "another model", plan=plan)
    assert account.spend.ledger == ledger_of(15)
    with pytest.raises(ClientBudgetExhaustedError, match="15 are taken"):
        charge(state, None, 1, plan=plan)


def test_clients_do_not_share_accounts(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "ledger.jsonl")
    charge(RecordDict(), journal, 1)
    assert PrivacyAccount.restore(RecordDict(), PLAN, client=4, journal=journal).spend.rounds == 0
