"""The Ray engine on a cluster of several machines (several Ray nodes on this one)."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.simulation.ray import engine
from fedsim.simulation.ray.engine import RayEngine
from fedsim.simulation.settings import RuntimeSettings

pytest.importorskip("ray", reason="engine ray needs the extra `ray`")

SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def machines(no_ray: None) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    cluster.add_node(**SMALL)
    yield cluster
    cluster.shutdown()


def counting_client() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import ray

        rounds = int(context.state.config_records.get("count", ConfigRecord({"n": 0}))["n"]) + 1  # pyright: ignore[reportArgumentType]
        context.state["count"] = ConfigRecord({"n": rounds})
        machine = ray.get_runtime_context().get_node_id()
        content = {
            "said": ConfigRecord({"machine": machine}),
            "metrics": MetricRecord({"n": rounds}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def round_of(grid: Grid) -> dict[int, Message]:
    asked = [Message(RecordDict(), node, MessageType.TRAIN) for node in grid.get_node_ids()]
    return {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(asked)}


@pytest.mark.slow
def test_a_machine_that_goes_takes_its_clients_along_until_there_is_room(
    machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        import ray

        first = round_of(grid)
        where = {n: r.content.config_records["said"]["machine"] for n, r in first.items()}
        assert len(set(where.values())) == 2, "one worker on each machine"
        here = ray.get_runtime_context().get_node_id()
        gone = {node for node, machine in where.items() if machine != here}
        machines.remove_node(machines.list_all_nodes()[1], allow_graceful=False)
        answered = dict.fromkeys(first, 1)

        def rounds_until(failing: set[int]) -> dict[int, Message]:
            while True:  # a machine that shuts down may still answer for some of its clients
                replies = round_of(grid)
                for node, reply in replies.items():
                    answered[node] += not reply.has_error()
                failed = {node for node, reply in replies.items() if reply.has_error()}
                assert failed <= gone
                if failed == failing:
                    return replies

        failed = {node: r for node, r in rounds_until(gone).items() if r.has_error()}
        assert all("no room for another" in str(reply.error.reason) for reply in failed.values())
        machines.add_node(**SMALL)
        last = rounds_until(set())
        for node, reply in last.items():
            assert reply.content.metric_records["metrics"]["n"] == answered[node], (
                "its state came along"
            )

    settings = RuntimeSettings(engine="ray", workers=2, address=machines.address)
    monkeypatch.setattr(engine, "_REPLACEMENT_SECONDS", 3.0)
    RayEngine(settings).execute(app, counting_client(), 4)


EXPERIMENT: dict[str, Any] = {
    "name": "cluster",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.mark.slow
def test_without_an_address_a_cluster_on_this_machine_is_left_alone(
    machines: Any, tmp_path: Path
) -> None:
    """Ray itself would join it, and refuse to say how many processors it may use.

    Engine flower starts Ray by the same function.
    """
    runtime = {"engine": "ray", "workers": 1}
    run = run_experiment(EXPERIMENT, overrides={"runtime": runtime}, out=tmp_path / "run")
    assert len(run.rounds) == 2
    assert len(machines.list_all_nodes()) == 2


# The loss of one step, on a worker of a machine that is not the head's, names its machine through a
# pipe and never returns: the client is charged, and its reply will not come.
PLUGIN = """\
import os
import ray
from torch import nn

def loss(outputs, targets):
    found = nn.functional.cross_entropy(outputs, targets, reduction="none")
    if not ray.is_initialized():
        return found
    here = ray.get_runtime_context().get_node_id()
    if here == {head!r}:
        return found
    try:
        os.unlink({armed!r})  # one process can
    except OSError:
        return found
    with open({pipe!r}, "w") as pipe:
        pipe.write(here)
    with open({never!r}) as pipe:  # until the machine goes
        pipe.read()
"""


class ArmInRound:
    """An observer that has a machine removed in a round, by the test."""

    def __init__(self, round_number: int, armed: Path) -> None:
        self._round, self._armed = round_number, armed

    def started(self, federation: Any, path: Path) -> None: ...

    def round_finished(self, row: Any) -> None:
        if row["round"] == self._round - 1:
            self._armed.touch()

    def ended(self) -> None: ...


def remove_the_machine_that_asks(cluster: Any, pipe: Path, removed: list[str]) -> None:
    """Wait for the name of a machine in a pipe and end it at once, with its workers."""
    name = pipe.read_text()
    (machine,) = (one for one in cluster.list_all_nodes() if one.node_id == name)
    cluster.remove_node(machine, allow_graceful=False)
    removed.append(name)


@pytest.mark.parametrize(
    "sums",
    [
        pytest.param(False, marks=pytest.mark.slow, id="plain"),
        pytest.param(True, marks=pytest.mark.long, id="secure sums"),
    ],
)
def test_a_run_that_loses_a_machine_goes_on_with_the_local_result(
    machines: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights_of: Callable[[Path], dict[str, bytes]],
    sums: bool,
) -> None:
    """Four machines, three workers; one machine goes after a charge and before the reply to it."""
    for _ in range(2):
        machines.add_node(**SMALL)
    monkeypatch.chdir(tmp_path)
    armed, pipe, never = (tmp_path / name for name in ("armed", "pipe", "never"))
    os.mkfifo(pipe)
    os.mkfifo(never)
    names = {"armed": str(armed), "pipe": str(pipe), "never": str(never)}
    (tmp_path / "plugin.py").write_text(PLUGIN.format(head=machines.head_node.node_id, **names))
    experiment = {
        **EXPERIMENT,
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 12}},
        "model": {"name": "mlp", "args": {"hidden": [8]}, "loss": "./plugin.py:loss"},
        "federation": {"rounds": 4, "clients_per_round": 9},
        "local": {"steps": 2, "batch_size": 16, "vectorized_clients": 2},
        **({"secure_aggregation": {"protocol": "additive"}} if sums else {}),
    }
    local = run_experiment(experiment, out=tmp_path / "local")
    removed: list[str] = []
    arguments = (machines, pipe, removed)
    Thread(target=remove_the_machine_that_asks, args=arguments, daemon=True).start()
    runtime = {"engine": "ray", "workers": 3, "address": machines.address}
    out = tmp_path / "ray"
    observer = ArmInRound(3, armed)
    run = run_experiment(experiment, overrides={"runtime": runtime}, out=out, callback=observer)
    assert len(removed) == 1
    assert len(machines.list_all_nodes()) == 3
    assert all(row["failed"] == [] for row in run.rounds), "every client went on"
    assert weights_of(local.path) == weights_of(out)
    charges = [sorted((path / "ledger.jsonl").open()) for path in (local.path, out)]
    if not sums:  # a secure upload is bound to its run, and so is the record of its charge
        assert charges[0] == charges[1], "no charge is lost or doubled"
        for name in ("privacy.json", "clients.csv"):
            assert (local.path / name).read_bytes() == (out / name).read_bytes(), name
    charged = [(row["client"], row["round"]) for row in map(json.loads, charges[1])]
    assert len(charged) == len(set(charged)) == 4 * 9
    assert verify_run(RunDirectory.open(out)).problems == ()
