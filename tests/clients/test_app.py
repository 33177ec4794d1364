"""The clients' app: alone or many at once, each gives the same answer and is charged first."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.clients import client_round
from fedsim.clients.app import BatchClientApp
from fedsim.clients.faults import ClientFailureError
from fedsim.clients.task import ClientScores, ClientTask
from fedsim.experiment import load_experiment
from fedsim.federation.apps import client_app
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.protocol.arrays import digest, to_arrays
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import STAGES, EvaluateRequest, TrainReply, TrainRequest
from fedsim.protocol.node_registration import identity_of, registration_message
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalGrid

CLIENTS = 3


def federation(tmp_path: Path, *, private: bool = True) -> Federation:
    experiment: dict[str, Any] = {
        "name": "alone",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 2},
        "local": {"steps": 2, "batch_size": 16},
        "evaluation": None if private else {"holdout": 0.2},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }
    if not private:
        experiment["privacy"] = None
    return assemble(load_experiment(experiment), ledger=tmp_path / "ledger.jsonl")


def ask(app: ClientApp, *requests: Message) -> dict[int, Message]:
    """Send requests over the local grid and return each client's reply."""
    with server_identity(1):
        replies = LocalGrid(app, CLIENTS).send_and_receive(list(requests))
        return {reply.metadata.src_node_id - FIRST_NODE: reply for reply in replies}


def train_requests(of: Federation) -> list[Message]:
    with server_identity(1):
        request = TrainRequest(1, of.initial_arrays())
        return [request.to_message(FIRST_NODE + client) for client in range(CLIENTS)]


@pytest.mark.parametrize("private", [True, False])
def test_a_client_alone_answers_and_is_charged_as_in_a_batch(private: bool, tmp_path: Path) -> None:
    found = {}
    for kind in ("alone", "batch"):
        (tmp_path / kind).mkdir()
        here = federation(tmp_path / kind, private=private)
        app = (
            BatchClientApp(here.client_task, block_of=here.blocks.plan.block_of)
            if kind == "alone"
            else client_app(here)
        )
        replies = ask(app, *train_requests(here))
        ledger = FileJournal(tmp_path / kind / "ledger.jsonl")
        found[kind] = (
            [
                digest(to_arrays(TrainReply.from_message(replies[client]).arrays))
                for client in range(CLIENTS)
            ],
            [ledger.head(client) for client in range(CLIENTS)] if private else None,
        )
    assert found["alone"] == found["batch"]
    assert len(set(found["alone"][0])) == CLIENTS


def test_a_node_says_which_client_it_is(tmp_path: Path) -> None:
    app = BatchClientApp(federation(tmp_path).client_task)
    with server_identity(1):
        requests = [registration_message(FIRST_NODE + client) for client in range(CLIENTS)]
    replies = ask(app, *requests)
    assert {client: identity_of(reply).number for client, reply in replies.items()} == {
        client: client for client in range(CLIENTS)
    }


@pytest.mark.parametrize("private", [True, False])
def test_a_private_client_reports_a_failure_without_its_text(private: bool, tmp_path: Path) -> None:
    here = federation(tmp_path, private=private)

    def broken() -> Any:
        raise ClientFailureError("no data") if not private else ValueError("patient 17 is ill")

    def task_of(client: int) -> ClientTask:
        task = here.client_task(client)
        return replace(task, data=replace(task.data, tensors=broken))

    app = BatchClientApp(task_of)
    replies = ask(app, *train_requests(here))
    reasons = {reply.error.reason or "" for reply in replies.values()}
    assert len(reasons) == 1
    reason = reasons.pop()
    assert ("ValueError at test_app.py" in reason) == private
    assert "patient" not in reason
    charged = FileJournal(tmp_path / "ledger.jsonl").clients()
    assert list(charged) == (list(range(CLIENTS)) if private else []), "charged before it failed"


def test_a_private_client_refuses_to_evaluate(tmp_path: Path) -> None:
    here = federation(tmp_path)
    task = replace(here.client_task(0), scores=ClientScores(lambda arrays: (1, {"accuracy": 1.0})))
    with server_identity(1):
        request = EvaluateRequest(1, here.initial_arrays()).to_message(FIRST_NODE)
    reply = ask(BatchClientApp(lambda client: task), request)[0]
    assert reply.has_error()
    assert "does not evaluate" in (reply.error.reason or "")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_secure_aggregation_is_refused_in_a_plain_experiment(
    stage: str, tmp_path: Path
) -> None:
    app = BatchClientApp(federation(tmp_path).client_task)
    with server_identity(1):
        request = Message(RecordDict(), FIRST_NODE, f"{MessageType.QUERY}.{stage}")
    context = Context(1, FIRST_NODE, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(ClientFailureError, match="has no secure_aggregation"):
        app(request, context)


def test_a_node_without_a_client_number_is_refused(tmp_path: Path) -> None:
    app = BatchClientApp(federation(tmp_path).client_task)
    with server_identity(1):
        request = registration_message(FIRST_NODE)
    with pytest.raises(ValueError, match="needs a whole-numbered 'partition-id'"):
        app(request, Context(1, FIRST_NODE, {}, RecordDict(), {}))


def models(replies: dict[int, Message]) -> list[str]:
    return [
        digest(to_arrays(TrainReply.from_message(replies[client]).arrays))
        for client in sorted(replies)
    ]


def whole(round_number: int, client: int) -> tuple[int, ...]:
    return tuple(range(CLIENTS))


@pytest.mark.parametrize(
    ("groups", "private"),
    [
        ([[2], [0, 1]], True),
        ([[0, 2], [1]], False),
    ],
)
def test_an_answer_depends_on_the_planned_block_and_not_on_the_requests_at_hand(
    groups: list[list[int]], private: bool, tmp_path: Path
) -> None:
    here = federation(tmp_path, private=private)
    requests = train_requests(here)
    app = BatchClientApp(here.client_task, block_of=whole)
    replies: dict[int, Message] = {}
    for group in groups:
        replies |= ask(app, *[requests[client] for client in group])
    (tmp_path / "other").mkdir()
    there = federation(tmp_path / "other", private=private)
    assert models(replies) == models(
        ask(BatchClientApp(there.client_task, block_of=whole), *requests)
    )


def test_clients_that_are_asked_together_are_charged_in_one_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appends: list[int] = []
    append_all = FileJournal.append_all

    def counted(journal: FileJournal, charges: Sequence[Charge]) -> None:
        appends.append(len(charges))
        append_all(journal, charges)

    monkeypatch.setattr(FileJournal, "append_all", counted)
    here = federation(tmp_path)
    ask(BatchClientApp(here.client_task), *train_requests(here))
    assert appends == [CLIENTS]
    monkeypatch.setattr(client_round, "MAX_CHARGED_CLIENTS", 2)
    again = federation(tmp_path)
    requests = [request_of(again, client, round_number=2) for client in range(CLIENTS)]
    ask(BatchClientApp(again.client_task), *requests)
    assert appends == [CLIENTS, 2, 1]


def request_of(of: Federation, client: int, *, round_number: int = 1) -> Message:
    with server_identity(1):
        return TrainRequest(round_number, of.initial_arrays()).to_message(FIRST_NODE + client)


def test_without_a_charge_on_disk_nobody_trains_and_no_account_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(journal: FileJournal, charges: Sequence[Charge]) -> None:
        raise OSError("disk full")

    def train(*arguments: object, **options: object) -> None:
        raise AssertionError("no charge, no training")

    monkeypatch.setattr(FileJournal, "append_all", full)
    monkeypatch.setattr(client_round, "block_of", train)
    here = federation(tmp_path)
    context = Context(1, FIRST_NODE, {"partition-id": 0}, RecordDict(), {})
    reply = BatchClientApp(here.client_task)(request_of(here, 0), context)
    assert "OSError" in (reply.error.reason or "")
    plans = here.plan.clients
    assert plans is not None
    assert here.accounts.of(0, plans[0]).spend.rounds == 0


def test_a_client_that_is_asked_twice_at_once_answers_twice_for_one_charge(tmp_path: Path) -> None:
    here = federation(tmp_path)
    app = BatchClientApp(here.client_task, block_of=whole)
    with server_identity(1):
        twice = [request_of(here, client) for client in (0, 1, 1, 2)]
        replies = list(LocalGrid(app, CLIENTS).send_and_receive(twice))
    digests = [digest(to_arrays(TrainReply.from_message(reply).arrays)) for reply in replies]
    assert len(digests) == 4
    assert digests[1] == digests[2]
    assert len(FileJournal(tmp_path / "ledger.jsonl").history(1)) == 1


def test_members_of_a_block_with_different_models_train_from_their_own(tmp_path: Path) -> None:
    here = federation(tmp_path, private=False)
    arrays, same = here.initial_arrays(), train_requests(here)
    zeros = ArrayRecord([np.zeros_like(array.numpy()) for array in arrays.values()])
    zeros = ArrayRecord(dict(zip(arrays.keys(), zeros.values(), strict=True)))
    app = BatchClientApp(here.client_task, block_of=whole)
    with server_identity(1):
        requests = [
            TrainRequest(1, zeros if client == 1 else arrays).to_message(FIRST_NODE + client)
            for client in range(CLIENTS)
        ]
    mixed, alike = models(ask(app, *requests)), models(ask(app, *same))
    assert [a == b for a, b in zip(mixed, alike, strict=True)] == [True, False, True]


@pytest.mark.parametrize("mods", [True, False])
def test_mods_act_on_every_message_of_the_local_engine(mods: bool, tmp_path: Path) -> None:
    """With mods each message is a call; without, the same messages are answered together."""
    here, seen = federation(tmp_path, private=False), []
    requests = train_requests(here)

    def count_and_change(message: Message, context: Context, app: ClientAppCallable) -> Message:
        seen.append(context.node_config["partition-id"])
        reply = app(message, context)
        metrics = reply.content["metrics"]
        assert isinstance(metrics, MetricRecord)
        metrics["num-examples"] = 17
        return reply

    app = BatchClientApp(here.client_task, mods=[count_and_change] if mods else [])
    replies = ask(app, *requests)
    assert seen == (list(range(CLIENTS)) if mods else [])
    examples = {TrainReply.from_message(reply).examples for reply in replies.values()}
    assert (examples == {17}) == mods
    assert models(replies) == models(ask(BatchClientApp(here.client_task), *requests))


def test_a_subclass_with_a_call_of_its_own_sees_every_message(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(BatchClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            seen.append(message.metadata.message_type)
            return super().__call__(message, context)

    here = federation(tmp_path)
    ask(Watching(here.client_task), *train_requests(here))
    assert seen == [MessageType.TRAIN] * CLIENTS
