"""A node that dies, answers twice or is not known fails alone; the run and its other clients go on.

Flower's SuperLink answers in its own name for a node that died (`kill -9`), so the source of that
reply is no registered node. Each loop over replies gets such a reply, a second reply, none, and
the reply of a stranger.
"""

import ast
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import fedsim
from fedsim.accountant import PrivacyLedger
from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.core.durable import GENESIS
from fedsim.protocol.errors import NODE_RESTARTED
from fedsim.protocol.flower_internals import server_identity
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalEngine, LocalGrid
from fedsim.tools.deployment.client_app import LEDGER, collect_ledgers, ledger_reply

ROOT = Path(__file__).parents[2]
CLIENTS = 4
VICTIM = 2
SUPERLINK = 1
UNAVAILABLE = Error(5, "Error: Node Unavailable")
SETTINGS = {
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
}
TROUBLES = ("dead", "restarted", "twice", "silent", "stranger")
LOSSES = ("dead", "restarted", "silent")


def loss_or_surplus(kind: str) -> list[tuple[str, str]]:
    """Return one trouble of each sort for a loop that another kind has all of: it is the same."""
    return [(kind, "dead"), (kind, "twice")]


def of_node(reply: Message, node: int, answered: str | None = None) -> Message:
    """Change the source of a reply, and the request that it names."""
    reply.metadata.__dict__["_src_node_id"] = node
    if answered is not None:
        reply.metadata.__dict__["_reply_to_message_id"] = answered
    return reply


class Line(LocalGrid):
    """A grid with trouble in the answers of one node to one type of message.

    Args:
        client_app: of every node.
        num_nodes: number of nodes.
        kind: end of the message type.
        trouble: one of `TROUBLES`.
        victim: number of the node.
        times: messages after which there is no more trouble.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        kind: str,
        trouble: str,
        victim: int = VICTIM,
        times: int = 1,
    ) -> None:
        super().__init__(client_app, num_nodes)
        self._kind, self._trouble, self._victim, self._left = kind, trouble, victim, times

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        sent = {message.metadata.dst_node_id: message for message in messages}
        for reply in super().send_and_receive(sent.values(), timeout=timeout):
            request = sent[reply.metadata.src_node_id]
            struck = request.metadata.message_type.endswith(self._kind)
            if not (struck and self._left and request.metadata.dst_node_id == self.node):
                yield reply
                continue
            self._left -= 1
            if self._trouble == "dead":
                yield of_node(Message(UNAVAILABLE, reply_to=request), SUPERLINK)
            elif self._trouble == "restarted":
                yield Message(Error(NODE_RESTARTED, "was restarted"), reply_to=request)
            elif self._trouble == "twice":
                yield from (reply, reply)
            elif self._trouble == "stranger":
                yield of_node(Message(reply.content, reply_to=request), 77, "of another run")
                yield of_node(Message(reply.content, reply_to=request), 77)  # in the node's place
                yield reply

    @property
    def node(self) -> int:
        return FIRST_NODE + self._victim


class TroubledEngine(LocalEngine):
    def __init__(self, **trouble: Any) -> None:
        self._trouble = trouble

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
        with server_identity(1):
            server_app(Line(client_app, num_nodes, **self._trouble), context)


def run(
    out: Path, secure: dict[str, Any] | None = None, evaluates: bool = False, **trouble: Any
) -> fedsim.RunResult:
    experiment = {
        "name": "troubled",
        "secure_aggregation": secure,
        "evaluation": {"holdout": 0.2} if evaluates else None,
        **SETTINGS,
    }
    return run_experiment(experiment, out=out, engine=TroubledEngine(**trouble))


def reason(trouble: str) -> str:
    texts = {"dead": "Node Unavailable", "restarted": "was restarted", "silent": "no reply"}
    return texts[trouble]


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [*(("train", trouble) for trouble in TROUBLES), *loss_or_surplus("evaluate")],
)
def test_training_and_evaluation_fail_one_client_and_go_on(
    tmp_path: Path, logged: Any, kind: str, trouble: str
) -> None:
    result = run(tmp_path / "r", evaluates=True, kind=kind, trouble=trouble)
    assert [row["round"] for row in result.rounds] == [1, 2]
    row = result.rounds[0] if kind == "train" else result.rounds[0]["evaluated"]
    named = row["participants"] if kind == "train" else row["clients"]
    if trouble in LOSSES:
        assert [one["client"] for one in row["failed"]] == [VICTIM]
        assert reason(trouble) in row["failed"][0]["reason"]
        assert VICTIM not in named
    else:
        assert not row["failed"]
        assert len(named) == CLIENTS
        assert "is left out" in logged.text
    assert result.rounds[1]["participants"] == list(range(CLIENTS)), "it comes back"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_roll_call_waits_for_a_node_that_is_gone(tmp_path: Path, trouble: str) -> None:
    result = run(tmp_path / "r", kind="node_registration", trouble=trouble)
    assert [row["participants"] for row in result.rounds] == [list(range(CLIENTS))] * 2


@pytest.mark.parametrize(
    ("stage", "trouble"),
    [
        *loss_or_surplus("secagg_shares"),
        *(("secagg_masked", trouble) for trouble in TROUBLES),
        *loss_or_surplus("secagg_unmask"),
    ],
)
def test_masking_goes_on_without_a_dead_client(tmp_path: Path, stage: str, trouble: str) -> None:
    secure = {"protocol": {"name": "secagg", "threshold": 3}, "min_clients": 3}
    result = run(tmp_path / "r", secure, kind=stage, trouble=trouble)
    first, second = result.rounds
    if trouble in LOSSES and stage != "secagg_unmask":
        assert [one["client"] for one in first["failed"]] == [VICTIM]
        assert reason(trouble) in first["failed"][0]["reason"]
        assert VICTIM not in first["participants"]
    else:
        assert first["participants"] == list(range(CLIENTS))
    assert second["participants"] == list(range(CLIENTS)), "it comes back"


@pytest.mark.parametrize(
    ("stage", "trouble"),
    [*loss_or_surplus("secagg_hello"), *(("secagg_combine", trouble) for trouble in TROUBLES)],
)
def test_a_helper_is_asked_again(tmp_path: Path, stage: str, trouble: str) -> None:
    result = run(tmp_path / "r", {}, kind=stage, trouble=trouble, victim=CLIENTS)
    assert [row["participants"] for row in result.rounds] == [list(range(CLIENTS))] * 2
    asked_again = [row["secure_aggregation"]["retried"] for row in result.rounds]
    assert asked_again == [int(trouble in LOSSES), 0]


def test_a_dead_helper_is_named_with_the_reason(tmp_path: Path) -> None:
    trouble = {"kind": "secagg_combine", "trouble": "dead", "victim": CLIENTS, "times": 9}
    with pytest.raises(RunFailedError, match=r"helpers \[1\] did not answer.*Node Unavailable"):
        run(tmp_path / "r", {}, **trouble)


def test_a_helper_that_was_restarted_comes_back(tmp_path: Path) -> None:
    """A restarted helper has lost its key; it is greeted again after the round that it lost."""

    class Restarted(LocalEngine):
        def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
            class Forgets(LocalGrid):
                combined = False

                def send_and_receive(
                    self, messages: Iterable[Message], *, timeout: float | None = None
                ) -> Iterator[Message]:
                    asked = list(messages)
                    combine = asked[0].metadata.message_type.endswith("combine")
                    if combine and not self.combined:
                        self.combined = True
                        self._contexts[FIRST_NODE + CLIENTS].state.clear()
                    return super().send_and_receive(asked, timeout=timeout)

            context = Context(1, 0, {}, RecordDict(), {})
            with server_identity(1):
                server_app(Forgets(client_app, num_nodes), context)

    experiment = {
        "name": "restarted",
        "secure_aggregation": {"on_abort": "skip_round"},
        **SETTINGS,
    }
    result = run_experiment(experiment, out=tmp_path / "r", engine=Restarted())
    assert [len(row["participants"]) for row in result.rounds] == [0, CLIENTS]
    assert "send a Hello first" in result.rounds[0]["secure_aggregation"]["aborted"]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_dead_node_does_not_cost_the_ledgers_of_the_others(tmp_path: Path, trouble: str) -> None:
    for client in range(CLIENTS):
        path = tmp_path / str(client)
        path.touch()
        FileJournal(path).append(Charge(client, 1, "asked", 1, PrivacyLedger(), GENESIS))
    app = ClientApp()

    @app.query(LEDGER)
    def ledger(message: Message, context: Context) -> Message:
        return ledger_reply(tmp_path / str(context.node_config["partition-id"]), message)

    copy = tmp_path / "copy"
    copy.touch()
    with server_identity(1):
        collect_ledgers(Line(app, CLIENTS, kind=LEDGER, trouble=trouble), copy, timeout=1)
    there = {json.loads(line)["client"] for line in copy.read_text().splitlines()}
    lost = {VICTIM} if trouble in LOSSES else set()
    assert there == set(range(CLIENTS)) - lost


def test_every_loop_over_replies_is_the_same_one() -> None:
    """A new loop over replies of its own would have none of these checks."""
    receive = ("send_and_receive", "pull_messages")
    texts = {
        path: path.read_text()
        for room in ("fedsim", "server", "clients")
        for path in (ROOT / room).rglob("*.py")
    }
    loops = {
        (str(path.relative_to(ROOT)), function.name)
        for path, text in texts.items()
        if any(name in text for name in receive)
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and function.name not in receive  # they pass on
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in receive
    }
    grids = ("fedsim/simulation/", "fedsim/tools/deployment/server_app.py")
    others = {(path, name) for path, name in loops if not path.startswith(grids)}
    assert others == {("fedsim/protocol/traffic.py", "exchange")}
