"""The ledger mod in Flower apps that know nothing of fedsim."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedsim.accountant import (
    Gaussian,
    NonPrivate,
    PldAccountant,
    PoissonSampled,
    PrivacyLedger,
    RdpAccountant,
)
from fedsim.clients.flower_mod import RECORD, PrivacyLedgerMod, client_ledgers, declare_release
from fedsim.protocol.flower_internals import server_identity
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalGrid
from fedsim.tools.totals.sources import read_source
from fedsim.tools.totals.totals import account_of

STEP = PoissonSampled(0.1, Gaussian(1.0))


def answer(message: Message) -> Message:
    content = RecordDict(
        {
            "arrays": ArrayRecord(),
            "metrics": MetricRecord({"num-examples": 10, "train_loss": 0.5}),
        }
    )
    return Message(content, reply_to=message)


def app_of(mod: PrivacyLedgerMod, train: Callable[[Message, Context], None]) -> ClientApp:
    app = ClientApp()

    @app.train(mods=[mod])
    def run(message: Message, context: Context) -> Message:
        train(message, context)
        return answer(message)

    return app


def ask(app: ClientApp, rounds: int, clients: int = 2) -> list[list[Message]]:
    grid = LocalGrid(app, clients)
    found = []
    with server_identity(1):
        for number in range(1, rounds + 1):
            requests = [
                Message(
                    RecordDict({"config": ConfigRecord({"server-round": number})}),
                    FIRST_NODE + client,
                    "train",
                )
                for client in range(clients)
            ]
            found.append(list(grid.send_and_receive(requests)))
    return found


def steps(count: int) -> Callable[[Message, Context], None]:
    return lambda message, context: declare_release(context, STEP, count)


def test_epsilon_is_of_all_rounds_together() -> None:
    replies = ask(app_of(PrivacyLedgerMod(delta=1e-5), steps(5)), rounds=3)
    for number, of_round in enumerate(replies, start=1):
        for client, reply in enumerate(of_round):
            record = reply.content.config_records[RECORD]
            expected = PldAccountant().compose(STEP, 5 * number).get_epsilon(1e-5)
            assert record["epsilon"] == expected
            assert record["client"] == client
            ledger = PrivacyLedger.from_text(str(record["ledger"]))
            assert ledger.entries == ((STEP, 5 * number),)
            assert record["not-covered"] == ["train_loss"]
            assert "epsilon" not in reply.content.metric_records["metrics"]


def test_releases_that_are_known_before_are_charged_before() -> None:
    seen: list[str] = []

    def train(message: Message, context: Context) -> None:
        seen.append(str(context.state.config_records["privacy-ledger"]["ledger"]))

    def planned(message: Message, context: Context) -> Any:
        return [(STEP, int(str(message.content.config_records["config"]["server-round"])))]

    for releases, count in (([(STEP, 7)], 14), (planned, 3)):
        mod = PrivacyLedgerMod(delta=1e-5, releases=releases, accountant="rdp")
        replies = ask(app_of(mod, train), rounds=2, clients=1)
        expected = RdpAccountant().compose(STEP, count).get_epsilon(1e-5)
        assert replies[-1][0].content.config_records[RECORD]["epsilon"] == expected
        assert PrivacyLedger.from_text(seen[-1]).entries == ((STEP, count),)


def test_a_round_without_a_declaration_has_no_guarantee(logged: Any) -> None:
    replies = ask(app_of(PrivacyLedgerMod(delta=1e-5), lambda m, c: None), 1, clients=1)
    record = replies[0][0].content.config_records[RECORD]
    assert math.isinf(float(str(record["epsilon"])))
    assert PrivacyLedger.from_text(str(record["ledger"])).entries == ((NonPrivate(), 1),)
    assert "declared no release in this round" in logged.text
    assert client_ledgers(replies[0])["clients"][0]["epsilon"] is None


def test_a_journal_survives_a_restart_and_is_a_ledger_of_fedsim(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ask(app_of(PrivacyLedgerMod(delta=1e-5, journal=path), steps(5)), rounds=2)
    # A new app and a new state, as after a restart.
    replies = ask(app_of(PrivacyLedgerMod(delta=1e-5, journal=path), steps(5)), rounds=2)
    expected = PldAccountant().compose(STEP, 20).get_epsilon(1e-5)
    assert replies[-1][0].content.config_records[RECORD]["epsilon"] == expected
    account = account_of([read_source(str(path))], delta=1e-5)
    assert [total.epsilon for total in account.clients] == [expected] * 2


def test_a_failed_round_is_charged_for_what_it_declared(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> None:
        declare_release(context, STEP, 5)
        raise RuntimeError("out of memory")

    path = tmp_path / "ledger.jsonl"
    replies = ask(app_of(PrivacyLedgerMod(delta=1e-5, journal=path), train), rounds=1)
    assert all(reply.has_error() for reply in replies[0])
    account = account_of([read_source(str(path))], delta=1e-5)
    assert account.clients[0].ledger.entries == ((STEP, 5),)
    with pytest.raises(ValueError, match=r"has no record 'privacy'"):
        client_ledgers(replies[0])


def test_other_replies_are_counted() -> None:
    mod = PrivacyLedgerMod(delta=1e-5)
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        declare_release(context, STEP)
        return answer(message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message)

    grid = LocalGrid(app, 1)
    with server_identity(1):
        found = [
            next(iter(grid.send_and_receive([Message(RecordDict(), FIRST_NODE, kind)])))
            for kind in ("evaluate", "train")
        ]
    assert RECORD not in found[0].content
    assert found[1].content.config_records[RECORD]["other-replies"] == 1


def test_a_strategy_of_flower_runs_with_it_and_its_ledgers_are_read(tmp_path: Path) -> None:
    """FedAvg refuses replies whose records differ; ledgers go to a file that fedsim reads."""
    mod = PrivacyLedgerMod(delta=1e-5, metric="epsilon")

    class WithLedgers(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            given = list(replies)
            (tmp_path / "ledgers.json").write_text(json.dumps(client_ledgers(given)))
            return super().aggregate_train(server_round, given)

    server = ServerApp()
    results = []

    @server.main()
    def main(grid: Any, context: Context) -> None:
        results.append(WithLedgers(fraction_evaluate=0.0).start(grid, ArrayRecord(), num_rounds=2))

    with server_identity(1):
        server(LocalGrid(app_of(mod, steps(5)), 2), Context(1, 0, {}, RecordDict(), {}))
    expected = PldAccountant().compose(STEP, 10).get_epsilon(1e-5)
    assert results[0].train_metrics_clientapp[2]["epsilon"] == pytest.approx(expected)
    account = account_of([read_source(str(tmp_path / "ledgers.json"))], delta=1e-5)
    assert [total.epsilon for total in account.clients] == [expected] * 2


@pytest.mark.parametrize(
    "settings", [{"delta": 0.0}, {"delta": 1e-5, "accountant": "gdp"}, {"delta": 1.0}]
)
def test_wrong_settings_are_refused_at_once(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"delta|accountant"):
        PrivacyLedgerMod(**settings)


def test_two_replies_of_one_client_have_no_one_ledger() -> None:
    replies = ask(app_of(PrivacyLedgerMod(delta=1e-5), steps(1)), rounds=2, clients=1)
    with pytest.raises(ValueError, match=r"two replies are of client 0"):
        client_ledgers([of_round[0] for of_round in replies])
