"""One client's app: it answers as the batch app does, and a failure names no private text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.app import BatchClientApp
from fedsim.clients.failure_text import ClientFailureError
from fedsim.clients.secure.channel import STAGES
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.shards import client_app
from fedsim.protocol.arrays import digest
from fedsim.protocol.messages import EvaluateRequest, TrainReply, TrainRequest
from fedsim.protocol.roll_call import identity_of, roll_call_message
from fedsim.simulation.flower_internals import server_identity
from fedsim.simulation.local_grid import FIRST_NODE, LocalGrid

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
            BatchClientApp(here.client_task)
            if kind == "alone"
            else client_app(here, in_process=True, ledger=None)
        )
        replies = ask(app, *train_requests(here))
        ledger = FileJournal(tmp_path / kind / "ledger.jsonl")
        found[kind] = (
            [digest(TrainReply.from_message(replies[client]).arrays) for client in range(CLIENTS)],
            [ledger.head(client) for client in range(CLIENTS)] if private else None,
        )
    assert found["alone"] == found["batch"]
    assert len(set(found["alone"][0])) == CLIENTS


def test_a_node_says_which_client_it_is(tmp_path: Path) -> None:
    app = BatchClientApp(federation(tmp_path).client_task)
    with server_identity(1):
        requests = [roll_call_message(FIRST_NODE + client) for client in range(CLIENTS)]
    replies = ask(app, *requests)
    assert {client: identity_of(reply).number for client, reply in replies.items()} == {
        client: client for client in range(CLIENTS)
    }


@pytest.mark.parametrize("private", [True, False])
def test_a_private_client_reports_a_failure_without_its_text(private: bool, tmp_path: Path) -> None:
    here = federation(tmp_path, private=private)

    def broken() -> Any:
        raise ClientFailureError("no data") if not private else ValueError("patient 17 is ill")

    app = BatchClientApp(lambda client: replace(here.client_task(client), data=broken))
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
    task = replace(here.client_task(0), evaluate=lambda arrays: (1, {"accuracy": 1.0}))
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
        request = roll_call_message(FIRST_NODE)
    with pytest.raises(ValueError, match="needs a whole-numbered 'partition-id'"):
        app(request, Context(1, FIRST_NODE, {}, RecordDict(), {}))
