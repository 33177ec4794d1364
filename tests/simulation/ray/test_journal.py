"""The ledger's only writer and the journal of a worker: on disk first, released second."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant import Gaussian, PoissonSampled, PrivacyLedger
from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError
from fedsim.core.durable import GENESIS
from fedsim.simulation.ray.journal import JournalActor, RemoteJournal


def charge(round_number: int, previous: str = GENESIS, client: int = 1) -> Charge:
    ledger = PrivacyLedger()
    ledger.record(PoissonSampled(0.1, Gaussian(1.0)), 5)
    return Charge(client, round_number, f"model-{round_number}", 5, ledger, previous)


class Line:
    """The connection to the actor; it can break before or after the actor's work."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cut: str | None = None

    def __call__(self, method: Any, argument: object) -> Any:
        self.calls.append(method.__name__)
        if self.cut == "before":
            raise JournalError("cut")
        answer = method(argument)
        if self.cut == "after":
            raise JournalError("cut")
        return answer


def test_what_a_worker_appends_is_in_the_file(tmp_path: Path) -> None:
    actor, line = JournalActor(tmp_path / "ledger.jsonl"), Line()
    journal = RemoteJournal(actor, line)
    assert journal.history(1) == ()
    first = charge(1)
    journal.append_all([first])
    second = charge(2, first.hash)
    journal.append_all([second])
    assert journal.history(1, after=2) == (), "it knows the number of charges"
    assert line.calls == ["history", "append_all", "append_all"], "histories are read once"
    assert [c.hash for c in journal.history(1)] == [first.hash, second.hash]
    assert [c.hash for c in FileJournal(tmp_path / "ledger.jsonl").history(1)] == [
        first.hash,
        second.hash,
    ]


def test_a_worker_keeps_no_charges(tmp_path: Path) -> None:
    """Over many rounds charges would outgrow the clients' data."""
    journal = RemoteJournal(JournalActor(tmp_path / "ledger.jsonl"), Line(), clients=[1])
    previous = GENESIS
    for round_number in range(1, 30):
        assert journal.history(1, after=round_number - 1) == ()
        one = charge(round_number, previous)
        journal.append_all([one])
        previous = one.hash
    assert len(pickle.dumps({k: v for k, v in vars(journal).items() if k not in LINKS})) < 200


LINKS = ("_journal_actor", "_call")


def test_the_same_charge_again_is_written_once(tmp_path: Path) -> None:
    """Ray repeats a call if the actor died before its reply."""
    path = tmp_path / "ledger.jsonl"
    JournalActor(path).append_all([charge(1)])
    JournalActor(path).append_all([charge(1)])
    assert len(path.read_text().splitlines()) == 1
    with pytest.raises(JournalError, match="does not continue"):
        JournalActor(path).append_all([charge(2)])


@pytest.mark.parametrize("cut", ["before", "after"])
def test_after_a_cut_line_the_worker_asks_what_is_true(tmp_path: Path, cut: str) -> None:
    line = Line()
    journal = RemoteJournal(JournalActor(tmp_path / "ledger.jsonl"), line)
    journal.history(1)
    line.cut = cut
    with pytest.raises(JournalError):
        journal.append_all([charge(1)])
    line.cut = None
    assert len(journal.history(1)) == (1 if cut == "after" else 0)


def test_a_worker_whose_client_was_charged_elsewhere_is_refused(tmp_path: Path) -> None:
    """Two processes that both hold a client cannot both release a new update."""
    actor = JournalActor(tmp_path / "ledger.jsonl")
    stale, fresh = RemoteJournal(actor, Line()), RemoteJournal(actor, Line())
    assert stale.history(1) == ()
    fresh.append_all([charge(1)])
    with pytest.raises(JournalError, match="does not continue"):
        stale.append_all([charge(2)])
    assert [c.round_number for c in stale.history(1)] == [1]


def test_histories_of_a_workers_clients_are_asked_for_together(tmp_path: Path) -> None:
    actor, line = JournalActor(tmp_path / "ledger.jsonl"), Line()
    actor.append_all([charge(1, client=client) for client in range(4)])
    journal = RemoteJournal(actor, line, clients=range(3))
    for client in (0, 2, 1):
        assert [c.hash for c in journal.history(client)] == [charge(1, client=client).hash]
    assert line.calls == ["histories"]
    assert len(journal.history(3)) == 1
    assert line.calls == ["histories", "history"]


def test_a_charge_that_goes_on_costs_no_look_at_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every round would read all earlier rounds."""
    actor, one = JournalActor(tmp_path / "ledger.jsonl"), charge(1)
    asked: list[int] = []
    history = FileJournal.history
    monkeypatch.setattr(
        FileJournal,
        "history",
        lambda self, client: (asked.append(client), history(self, client))[1],
    )
    actor.append_all([one])
    for round_number in range(2, 6):
        one = charge(round_number, one.hash)
        actor.append_all([one])
    assert asked == []
    actor.append_all([charge(5, one.previous)])
    assert asked == [1]
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 5
    assert FileJournal(tmp_path / "ledger.jsonl").head(1) == one.hash
    assert FileJournal(tmp_path / "ledger.jsonl").head(2) == GENESIS
