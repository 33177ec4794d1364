from dataclasses import replace
from pathlib import Path

import pytest

from fedsim.accountant import Gaussian, PrivacyLedger
from fedsim.accountant.ledger.journal import FileJournal, JournalWriteError
from fedsim.clients.account import (
    Accounts,
    ChargeRefusedError,
    ClientBudgetExhaustedError,
    LedgerUnwritableError,
    PrivacyAccount,
)
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
    accounts: Accounts, round_number: int, request: str = "model", plan: PrivacyPlan = PLAN
) -> PrivacyAccount:
    account = accounts.of(3, plan)
    proposed = account.propose(round_number=round_number, request=request, steps=5)
    return account if proposed is None else accounts.charge([(account, proposed)])[0]


def accounts_in(folder: Path, *, durable: bool = True) -> Accounts:
    return Accounts(FileJournal(folder / "ledger.jsonl") if durable else None)


def ledger_of(steps: int) -> PrivacyLedger:
    ledger = PrivacyLedger()
    ledger.record(PLAN.release_as(DpSgdMechanism).event, steps)
    return ledger


@pytest.mark.parametrize("durable", [True, False])
def test_spend_is_cumulative_over_rounds(tmp_path: Path, durable: bool) -> None:
    accounts = accounts_in(tmp_path, durable=durable)
    for number, round_number in enumerate((1, 2, 7), start=1):
        account = charge(accounts, round_number)
        assert account.spend.rounds == number
        assert account.spend.ledger == ledger_of(5 * number)
        assert account.spend.steps == 5 * number


def test_charges_of_another_process_are_read_from_the_journal(tmp_path: Path) -> None:
    ours, theirs = accounts_in(tmp_path), accounts_in(tmp_path)
    charge(ours, 1)
    charge(theirs, 2)
    account = ours.of(3, PLAN)
    assert account == theirs.of(3, PLAN) == accounts_in(tmp_path).of(3, PLAN)
    assert account.last_round == 2
    assert account.spend.ledger == ledger_of(10)


def test_a_charge_that_is_not_on_disk_is_in_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = accounts_in(tmp_path)
    charge(accounts, 1)

    def full(journal: FileJournal, charges: object) -> None:
        raise JournalWriteError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(FileJournal, "append_all", full)
        with pytest.raises(LedgerUnwritableError, match="disk full"):
            charge(accounts, 2)
    assert accounts.of(3, PLAN).spend.ledger == ledger_of(5)


def test_an_account_keeps_its_charges_under_another_plan(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    charge(accounts, 1)
    milder = replace(PLAN, release=replace(PLAN.release_as(DpSgdMechanism), noise_multiplier=2.2))
    spend = accounts.of(3, milder).spend
    assert (spend.noise_multiplier, spend.ledger, spend.steps) == (2.2, ledger_of(5), 5)


class TwoViews(PrivacyPlan):
    """A plan with a second charge, against whoever sees the client's own uploads."""

    def server_charges(self, first_step: int, steps: int) -> Charges | None:
        return [(Gaussian(0.5), steps)]


@pytest.mark.parametrize("durable", [True, False])
def test_both_ledgers_are_charged_before_a_release(tmp_path: Path, durable: bool) -> None:
    plan, accounts = TwoViews(**vars(PLAN)), accounts_in(tmp_path, durable=durable)
    charge(accounts, 1, plan=plan)
    account = charge(accounts, 2, plan=plan)
    assert account.spend.ledger == ledger_of(10)
    assert account.spend.against_server is not None
    assert account.spend.against_server.entries == ((Gaussian(0.5), 10),)
    if durable:
        history = FileJournal(tmp_path / "ledger.jsonl").history(3)
        second = [one.against_server for one in history]
        assert [one.entries for one in second if one is not None] == [((Gaussian(0.5), 5),)] * 2


@pytest.mark.parametrize("durable", [True, False])
def test_the_same_request_again_costs_nothing_more(tmp_path: Path, durable: bool) -> None:
    accounts = accounts_in(tmp_path, durable=durable)
    first = charge(accounts, 1)
    assert charge(accounts, 1) == first


def test_another_request_for_an_answered_round_is_refused(tmp_path: Path) -> None:
    """Noise is keyed by the round: answering twice would release the difference without noise."""
    accounts = accounts_in(tmp_path)
    charge(accounts, 1)
    charge(accounts, 2)
    for round_number, request in ((2, "another model"), (1, "model")):
        with pytest.raises(ChargeRefusedError, match="would reuse its noise"):
            charge(accounts, round_number, request)
    assert accounts.of(3, PLAN).spend.ledger == ledger_of(10)


def test_more_steps_than_the_target_affords_are_refused() -> None:
    accounts = Accounts(None)
    for round_number in (1, 2, 3):
        charge(accounts, round_number)
    with pytest.raises(
        ClientBudgetExhaustedError, match=r"target ε = 8 .* affords 15 steps, and 15 are"
    ):
        charge(accounts, 4)
    assert accounts.of(3, PLAN).spend.ledger == ledger_of(15)


@pytest.mark.parametrize("durable", [True, False])
def test_the_last_round_takes_the_steps_that_are_left(tmp_path: Path, durable: bool) -> None:
    plan = replace(PLAN, affordable_steps=12)
    accounts = accounts_in(tmp_path, durable=durable)
    taken = [charge(accounts, number, plan=plan).spend.round_steps for number in (1, 2, 3)]
    assert taken == [5, 5, 2]
    assert charge(accounts, 3, plan=plan).spend.round_steps == 2  # asked again, as before
    account = accounts.of(3, plan)
    assert (account.spend.steps, account.spend.ledger) == (12, ledger_of(12))
    with pytest.raises(ClientBudgetExhaustedError, match="12 are taken"):
        charge(accounts, 4, plan=plan)


@pytest.mark.parametrize("durable", [True, False])
def test_shuffled_data_is_charged_when_an_epoch_starts(tmp_path: Path, durable: bool) -> None:
    """Epochs of 4 batches, rounds of 5 steps: 2, 1 and 1 epochs start, then budget for 15 steps."""
    step = replace(PLAN.release_as(DpSgdMechanism), sampling=ShuffledEpochs(4))
    plan = replace(PLAN, release=step)
    accounts = accounts_in(tmp_path, durable=durable)
    for round_number, epochs in ((1, 2), (2, 3), (6, 4)):
        account = charge(accounts, round_number, plan=plan)
        assert account.spend.ledger.entries == ((step.event, epochs),)
    with pytest.raises(ClientBudgetExhaustedError, match="15 are taken"):
        charge(accounts, 7, plan=plan)


def test_a_round_within_an_epoch_costs_nothing_and_is_recorded(tmp_path: Path) -> None:
    step = replace(PLAN.release_as(DpSgdMechanism), sampling=ShuffledEpochs(100))
    plan = replace(PLAN, release=step, target_epsilon=None, affordable_steps=None)
    for round_number in (1, 2, 3):
        account = charge(accounts_in(tmp_path), round_number, plan=plan)
    assert account.spend.ledger.entries == ((step.event, 1),)
    history = FileJournal(tmp_path / "ledger.jsonl").history(3)
    assert [len(one.ledger) for one in history] == [1, 0, 0]
    assert account.spend.rounds == 3


def test_secure_noise_is_charged_for_every_answer() -> None:
    """It cannot give the same answer twice, so the same request again is a second release."""
    plan, accounts = replace(PLAN, secure_noise=True), Accounts(None)
    charge(accounts, 1, plan=plan)
    account = charge(accounts, 1, plan=plan)
    assert account.spend.ledger == ledger_of(10)
    account = charge(accounts, 1, "another model", plan=plan)
    assert account.spend.ledger == ledger_of(15)
    with pytest.raises(ClientBudgetExhaustedError, match="15 are taken"):
        charge(accounts, 1, plan=plan)


def test_clients_do_not_share_accounts(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    charge(accounts, 1)
    assert accounts.of(4, PLAN).spend.rounds == 0
