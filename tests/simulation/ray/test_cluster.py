"""The Ray engine on a cluster of several machines (several Ray nodes on this one)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.runs.runner import run_experiment
from fedsim.simulation.ray.engine import RayEngine
from fedsim.simulation.settings import RuntimeSettings

pytest.importorskip("ray", reason="engine ray needs the extra `ray`")
pytestmark = pytest.mark.slow

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


def test_a_machine_that_goes_takes_its_clients_along_until_there_is_room(machines: Any) -> None:
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
    RayEngine(settings, replacement_seconds=3.0).execute(app, counting_client(), 4)


EXPERIMENT: dict[str, Any] = {
    "name": "cluster",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_without_an_address_a_cluster_on_this_machine_is_left_alone(
    machines: Any, engine: str, tmp_path: Path
) -> None:
    """Ray itself would join it, and refuse to say how many processors it may use."""
    runtime = {"engine": engine, "workers": 2}
    run = run_experiment(EXPERIMENT, overrides={"runtime": runtime}, out=tmp_path / "run")
    assert len(run.rounds) == 2
    assert len(machines.list_all_nodes()) == 2


def test_the_result_and_the_ledger_are_those_of_one_process(machines: Any, tmp_path: Path) -> None:
    local = run_experiment(EXPERIMENT, out=tmp_path / "local")
    runtime = {"engine": "ray", "workers": 2, "address": machines.address}
    ray = run_experiment(EXPERIMENT, overrides={"runtime": runtime}, out=tmp_path / "ray")
    for name in ("model.safetensors", "privacy.json"):
        assert (local.path / name).read_bytes() == (ray.path / name).read_bytes(), name
    ledgers = [sorted((run.path / "ledger.jsonl").open()) for run in (local, ray)]
    assert ledgers[0] == ledgers[1]
