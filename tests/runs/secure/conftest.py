"""Whole runs under secure aggregation, with somebody on the line."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.numpy import load_file

import fedsim
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.protocol.flower_internals import server_identity
from fedsim.runs.runner import run_experiment
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalEngine, LocalGrid


class Wire(LocalEngine):
    """The local engine with somebody on the line.

    Args:
        lost: whether a message, or the reply to it, is lost; asked with the request.
        twisted: may change a reply.
    """

    def __init__(
        self,
        lost: Callable[[Message], bool] = lambda _: False,
        twisted: Callable[[Message, Message], None] = lambda *_: None,
    ) -> None:
        self.lost, self.twisted = lost, twisted
        self.seen: list[tuple[Message, Message]] = []
        self.grid: Grid | None = None

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
        with server_identity(1):
            self.grid = Tapped(client_app, num_nodes, self)
            server_app(self.grid, context)

    def replies(self, kind: str) -> list[tuple[Message, Message]]:
        """Return requests of a type with their replies."""
        return [pair for pair in self.seen if pair[0].metadata.message_type.endswith(kind)]


class Tapped(LocalGrid):
    def __init__(self, client_app: ClientApp, num_nodes: int, wire: Wire) -> None:
        super().__init__(client_app, num_nodes)
        self._wire = wire

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        asked = list(messages)
        by_node = {message.metadata.dst_node_id: message for message in asked}
        for reply in super().send_and_receive(asked, timeout=timeout):
            request = by_node[reply.metadata.src_node_id]
            if self._wire.lost(request):
                continue
            self._wire.twisted(request, reply)
            self._wire.seen.append((request, reply))
            yield reply


class Lab:
    """Small federations under secure aggregation, and what is asked of their runs.

    Args:
        directory: where control runs are kept; one control serves every test that asks for it.
    """

    clients = 6
    privacy: Mapping[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}
    quantized: Mapping[str, Any] = {"protocol": "quantized"}
    faults = (
        {"kind": "dropout_before", "clients": [1], "rounds": [1]},
        {"kind": "dropout_after", "clients": [2], "rounds": [2]},
    )
    wire = Wire

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._controls: dict[str, fedsim.RunResult] = {}

    def experiment(self, secure: Mapping[str, Any] | None, **sections: Any) -> dict[str, Any]:
        federation = {"rounds": 2, "weighting": "examples", **sections.pop("federation", {})}
        partition = {"scheme": "dirichlet", "num_clients": self.clients, "min_examples": 20}
        return {
            "name": "secure",
            "seed": 3,
            "data": {"dataset": "digits", "partition": partition},
            "model": {"name": "logistic"},
            "federation": federation,
            "local": {"steps": 2, "batch_size": 16},
            "privacy": None,
            "secure_aggregation": None if secure is None else dict(secure),
            **{name: list(v) if name == "faults" else v for name, v in sections.items()},
        }

    def run(
        self,
        out: Path,
        secure: Mapping[str, Any] | None,
        wire: LocalEngine | None = None,
        **sections: Any,
    ) -> fedsim.RunResult:
        return run_experiment(self.experiment(secure, **sections), out=out, engine=wire)

    def control(self, secure: Mapping[str, Any] | None, **sections: Any) -> fedsim.RunResult:
        """Return an undisturbed run, made when it is first asked for."""
        key = json.dumps(self.experiment(secure, **sections), sort_keys=True)
        if key not in self._controls:
            out = self._directory / str(len(self._controls))
            self._controls[key] = self.run(out, secure, **sections)
        return self._controls[key]

    def examples(self, client: int) -> Any:
        """Return the examples of a client."""
        return assemble(load_experiment(self.experiment({})), ledger=None).data.clients[client]

    @staticmethod
    def iid(clients: int) -> dict[str, Any]:
        return {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": clients}}

    @staticmethod
    def party(message: Message) -> int:
        """Return the node that a message from the server goes to: clients, then helpers."""
        return message.metadata.dst_node_id - FIRST_NODE

    def loses(
        self, kind: str, parties: Iterable[int], rounds: Iterable[int] = ()
    ) -> Callable[..., bool]:
        """Lose what these parties answer to requests of a type, in these rounds or in all."""
        gone, when = set(parties), set(rounds)
        now = [0]

        def lost(request: Message) -> bool:
            config = request.content.config_records.get("config")
            if config is not None:
                now[0] = int(config["server-round"])  # pyright: ignore[reportArgumentType]
            due = not when or now[0] in when
            asked = request.metadata.message_type.endswith(kind)
            return due and asked and self.party(request) in gone

        return lost

    @staticmethod
    def model(path: Path) -> dict[str, np.ndarray]:
        return load_file(path / "model.safetensors")

    @staticmethod
    def same_result(one: fedsim.RunResult, other: fedsim.RunResult) -> None:
        """Check that two runs have one result: model, ledger and participants of every round."""
        models = [load_file(run.path / "model.safetensors") for run in (one, other)]
        mine, yours = [{name: array.tobytes() for name, array in one.items()} for one in models]
        assert mine == yours  # the header of the file has the statement, which names the protocol
        for name in ("ledger.jsonl", "clients.csv"):
            assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
        keys = ("round", "participants", "test_loss", "epsilon_max", "withdrawn", "shortened")
        for mine, yours in zip(one.rounds, other.rounds, strict=True):
            assert [mine[key] for key in keys] == [yours[key] for key in keys]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("controls"))
