"""A secret draw of clients: all pay for every round, and no record tells who was drawn."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant import Gaussian, PoissonSampled
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.server.participation.participation import Participation

CLIENTS, ROUNDS = 6, 2
EXPERIMENT: dict[str, Any] = {
    "name": "drawn",
    "seed": 3,
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "iid", "num_clients": CLIENTS},
    },
    "model": {"name": "logistic"},
    "federation": {
        "rounds": ROUNDS,
        "clients_per_round": 2,
        "participation": {"scheme": "poisson"},
    },
    "local": {"steps": 1, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "trust": "central",
        "unit": "client",
        "noise_multiplier": 1.0,
        "delta": 1e-2,
        "max_update_norm": 0.5,
    },
    "faults": [{"kind": "error", "clients": [1], "rounds": [1]}],
}


def records(
    out: Path, drawn: Sequence[int], monkeypatch: pytest.MonkeyPatch, logged: Any
) -> dict[str, Any]:
    """Return all that a run leaves for others, with the same clients drawn in every round."""
    logged.records.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Participation, "draw", lambda self, number: tuple(drawn))
        run_experiment(EXPERIMENT, out=out)
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        del row["test_loss"], row["test_accuracy"], row["update_norm"]  # of the noisy models
    opening = json.loads((out / "checkpoint" / "opening.json").read_text())
    journal = FileJournal(out / "ledger.jsonl")
    privacy = json.loads((out / "privacy.json").read_text())
    for client in privacy["clients"]:
        del client["ledger_head"]  # a hash of the model's digest, too
    del privacy["ledger_digest"]
    texts = (str(privacy.pop("statement")), str(privacy.pop("statement_points")))
    assert "drawn or not" in "".join(texts)
    releases = [json.loads(one) for one in (out / "releases.jsonl").read_text().splitlines()]
    return {
        "rows": rows,
        "opening": (opening["round"], opening["clients"]),
        "uploads": [one["uploads"] for one in releases],
        "charges": [
            [(one.round_number, one.ledger.entries) for one in journal.history(client)]
            for client in range(CLIENTS)
        ],
        "clients.csv": (out / "clients.csv").read_text(),
        "privacy": privacy,
        "logs": [re.sub(r"[\d.]+ s$", "", record.getMessage()) for record in logged.records],
    }


def test_no_record_tells_who_was_drawn_or_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    everybody = records(tmp_path / "all", range(CLIENTS), monkeypatch, logged)  # one of them fails
    nobody = records(tmp_path / "none", (), monkeypatch, logged)
    assert everybody == nobody
    assert everybody["rows"][0]["participants"] == everybody["rows"][0]["failed"] == []
    assert everybody["rows"][0]["seconds"] == 0.0


@pytest.mark.slow
def test_every_client_is_charged_for_every_round_as_a_poisson_sample(tmp_path: Path) -> None:
    run_experiment(EXPERIMENT, out=tmp_path / "r")
    journal = FileJournal(tmp_path / "r" / "ledger.jsonl")
    for client in range(CLIENTS):
        charges = journal.history(client)
        assert [charge.round_number for charge in charges] == [1, 2]
        for charge in charges:
            ((event, count),) = charge.ledger.entries
            assert count == 1
            assert isinstance(event, PoissonSampled)
            assert event.sampling_rate == 2 / CLIENTS
            assert isinstance(event.event, Gaussian)
            assert event.event.noise_multiplier == pytest.approx(1.0, rel=1e-3)


@pytest.mark.slow
def test_a_round_without_clients_releases_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Participation, "draw", lambda self, number: ())
    result = run_experiment(EXPERIMENT, out=tmp_path / "r")
    # S z / (p N) = 0.5 · 1 / 2 in a round. False-alarm rate below 1e-9: 650 values, 20 % off.
    # The initial model adds 2 %.
    values = [value for one in result.model().state_dict().values() for value in one.flatten()]
    deviation = (sum(float(value) ** 2 for value in values) / len(values)) ** 0.5
    assert deviation == pytest.approx(0.25 * ROUNDS**0.5, rel=0.2)


def test_the_charge_is_on_disk_before_clients_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def draw(self: Participation, number: int) -> tuple[int, ...]:
        journal = FileJournal(tmp_path / "r" / "ledger.jsonl")
        seen.append(sum(len(journal.history(client)) for client in range(CLIENTS)))
        return ()

    monkeypatch.setattr(Participation, "draw", draw)
    run_experiment(EXPERIMENT, out=tmp_path / "r")
    assert seen == [CLIENTS, 2 * CLIENTS]


def test_a_draw_of_all_clients_has_its_guarantee(tmp_path: Path) -> None:
    """One of two copies of the terms lacked a guard: a valid run said "no guarantee"."""
    everybody = {"federation.clients_per_round": CLIENTS, "faults": []}
    result = run_experiment(EXPERIMENT, overrides=everybody, out=tmp_path / "r")
    assert result.privacy is not None
    privacy = json.loads((tmp_path / "r" / "privacy.json").read_text())
    assert privacy["private"] is True
    assert privacy["certificates"][0]["epsilon"] == privacy["system_epsilon"] > 0
    assert "has this guarantee: against" in privacy["statement"]
    assert verify_run(RunDirectory.open(tmp_path / "r")).problems == ()
