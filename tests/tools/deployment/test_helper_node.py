"""A SuperNode behind the clients is a helper: no data, no ledger, and one answer a round."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, Message, MessageType, RecordDict

from fedsim.experiment import load_experiment
from fedsim.federation.secure_setup import make_lasting_key
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.node_registration import NodeIdentity, identity_of, registration_message
from fedsim.protocol.secure import COMBINE, HELLO, from_records, make_query
from fedsim.secagg.errors import ReplayError
from fedsim.secagg.identity import verify_helper_key
from fedsim.secagg.messages import CombineReply, CombineRequest, Hello, HelloReply
from fedsim.tools.deployment.client_app import LEDGER_TYPE, NodeClient
from fedsim.tools.deployment.flower_app import write_app

EXPERIMENT: dict[str, Any] = {
    "name": "helped",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
    "secure_aggregation": {"aggregators": 3},
}


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with server_identity(1):
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return tmp_path


def context(number: int, state: Path) -> Context:
    config: dict[str, str | float] = {"partition-id": number, "state": str(state)}
    return Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={})


def test_nodes_behind_the_clients_are_helpers(directory: Path, tmp_path: Path) -> None:
    for number, helper in ((3, 1), (4, 2)):
        reply = NodeClient(directory)(registration_message(5), context(number, tmp_path))
        assert identity_of(reply) == NodeIdentity(helper, "helper")
    refused = NodeClient(directory)(registration_message(5), context(5, tmp_path))
    assert "K from 0 to 4 ('helped' has 3 clients and 2 helpers), got 5" in str(
        refused.error.reason
    )


@pytest.mark.parametrize(
    "named",
    [
        {"data": {**EXPERIMENT["data"], "dataset": {"path": "/gone/h.csv", "target": "ill"}}},
        {"federation": {"rounds": 1, "participation": {"scheme": "trace", "path": "/gone/t.csv"}}},
    ],
)
def test_a_helper_needs_and_reads_no_file_of_the_experiment(
    named: dict[str, object], directory: Path, tmp_path: Path
) -> None:
    (directory / "experiment.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **named}))
    reply = NodeClient(directory)(registration_message(5), context(3, tmp_path))
    assert identity_of(reply) == NodeIdentity(1, "helper")


def test_a_helper_reads_no_key_that_only_the_experiment_names(
    directory: Path, tmp_path: Path
) -> None:
    """The answer would tell the server whether the node has a file of that name."""
    keys = {"keys": {"helper_files": ["/etc/passwd", "/gone"]}, "aggregators": 3}
    changed = {**EXPERIMENT, "secure_aggregation": keys}
    (directory / "experiment.yaml").write_text(yaml.safe_dump(changed))
    own = context(3, tmp_path)
    reply = NodeClient(directory)(registration_message(5), own)
    assert "helper_files is for simulations" in str(reply.error.reason)
    own.node_config["helper-key"] = str(tmp_path / "node.key")
    reply = NodeClient(directory)(registration_message(5), own)
    assert identity_of(reply) == NodeIdentity(1, "helper")


def test_a_helper_keeps_its_key_and_answers_errors(directory: Path, tmp_path: Path) -> None:
    node, own = NodeClient(directory), context(3, tmp_path)
    settings = load_experiment(directory / "experiment.yaml").experiment.secure_aggregation
    assert settings is not None
    hello = Hello(run_id="r", params=settings.digest(), min_clients=3)
    first, again = (
        from_records(HelloReply, node(make_query(HELLO, hello, 5), own).content) for _ in range(2)
    )
    assert first == again
    request = CombineRequest(
        run_id="another",
        round_nonce=bytes(16),
        server_round=1,
        layout="",
        model="",
        asked=(0, 1, 2),
        plan="",
        length=3,
        release=True,
        clients=(0, 1, 2),
        envelopes=(b"", b"", b""),
    )
    reply = node(make_query(COMBINE, request, 5), own)
    assert not reply.has_error()
    with pytest.raises(ReplayError, match="send a Hello first"):
        from_records(CombineReply, reply.content)


def test_a_nodes_own_configuration_names_its_lasting_key(directory: Path, tmp_path: Path) -> None:
    """It wins over the file that the experiment names, which is of a simulation."""
    key = make_lasting_key(tmp_path / "node.key")
    own = context(4, tmp_path)
    own.node_config["helper-key"] = str(tmp_path / "node.key")
    settings = load_experiment(directory / "experiment.yaml").experiment.secure_aggregation
    assert settings is not None
    hello = Hello(run_id="r", params=settings.digest(), min_clients=3)
    said = from_records(HelloReply, NodeClient(directory)(make_query(HELLO, hello, 5), own).content)
    verify_helper_key(said, key.fingerprint, params=settings.digest(), client=0)


def test_a_helper_has_no_ledger_and_does_not_train(directory: Path, tmp_path: Path) -> None:
    node, own = NodeClient(directory), context(3, tmp_path)
    ledger = node(Message(RecordDict(), 5, LEDGER_TYPE), own)
    assert ledger.content.config_records["ledger"]["records"] == []
    assert node(Message(RecordDict(), 5, MessageType.TRAIN), own).has_error()


def test_a_helpers_key_stays_out_of_the_app(directory: Path, tmp_path: Path) -> None:
    for name in ("a.key", "b.key"):
        make_lasting_key(directory / name)
    files = {"secure_aggregation.keys.helper_files": ["a.key", "b.key"]}
    app = write_app(load_experiment(directory / "experiment.yaml", files), tmp_path / "app")
    assert not list(app.path.rglob("*.key"))


def test_the_app_waits_for_clients_and_helpers(directory: Path, tmp_path: Path) -> None:
    loaded = load_experiment(directory / "experiment.yaml")
    assert write_app(loaded, tmp_path / "app").num_nodes == 5
