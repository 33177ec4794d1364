"""Many clients: work and memory follow the clients of a round and the kinds of clients."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.clients.mechanisms import planner
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan
from fedsim.experiment import load_experiment
from fedsim.federation import assembly, client_plans
from fedsim.federation.federation import Federation
from fedsim.runs.runner import run_experiment
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.simulation.engines import LocalEngine, LocalGrid

CLIENTS, PER_ROUND = 300, 10

EXPERIMENT: dict[str, Any] = {
    "name": "many",
    "data": {
        "dataset": "blobs",
        "args": {"examples": 1600},
        "partition": {"scheme": "iid", "num_clients": CLIENTS},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 2, "clients_per_round": PER_ROUND},
    "local": {"steps": 2, "batch_size": 2},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


class Seen:
    """An observer that keeps the federation, and a grid that keeps itself."""

    def __init__(self) -> None:
        self.federation: Federation | None = None
        self.grid: LocalGrid | None = None

    def started(self, federation: Federation, path: Path) -> None:
        self.federation = federation

    def round_finished(self, row: Any) -> None: ...

    def ended(self) -> None: ...

    def make_grid(self, *arguments: Any, **options: Any) -> LocalGrid:
        self.grid = LocalGrid(*arguments, **options)
        return self.grid


def test_a_run_plans_each_kind_and_keeps_the_state_of_clients_that_were_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def counted(request: PlanRequest) -> PrivacyPlan:
        planned.append(request.examples)
        return planner.plan_privacy(request)

    monkeypatch.setattr(client_plans, "plan_privacy", counted)
    seen = Seen()
    run = run_experiment(
        EXPERIMENT, out=tmp_path / "r", callback=seen, engine=LocalEngine(seen.make_grid)
    )
    asked = {client for row in run.rounds for client in row["participants"]}
    assert PER_ROUND < len(asked) <= 2 * PER_ROUND
    assert seen.grid is not None
    assert len(seen.grid._contexts._made) == len(asked)
    assert seen.federation is not None
    assert len(planned) == len(set(map(id, seen.federation.plan.clients or ()))) <= 6
    lines = (tmp_path / "r" / "privacy.json").read_text().splitlines()
    rows = [json.loads(line.rstrip(",")) for line in lines if line.startswith('    {"client"')]
    assert [row["client"] for row in rows] == list(range(CLIENTS))
    assert rows == json.loads((tmp_path / "r" / "privacy.json").read_text())["clients"]


def test_the_largest_epsilon_of_kinds_is_that_of_clients() -> None:
    federation = assembly.assemble(load_experiment(EXPERIMENT), ledger=None, in_process=True)
    for accountant in ("pld", "rdp"):
        book = ClientLedgers(accountant)
        for client, own in enumerate(federation.plan.clients or ()):
            spend = own.spend_of(client)
            for event, count in own.charges(0, 2 * (1 + client % 3)):
                spend.ledger.record(event, count)
            book.record(spend)
            if client % 50 == 0:
                assert book.epsilon_max() == max(book.epsilons().values())
        assert book.epsilon_max() == max(book.epsilons().values())


def test_requests_do_not_look_at_all_weights() -> None:
    """They once did: a round of 1,000 among 100,000 clients compared 100,000,000 weights."""
    weights = assembly.assemble(load_experiment(EXPERIMENT), ledger=None).plan.weights
    assert "is_uniform" not in vars(weights)
    assert weights.announced(3) is None
    assert vars(weights)["is_uniform"] is True
