"""Flower's Ray simulation with Opacus in each client, as its users write it, tuned.

Tuned means: what can be kept is kept. A Flower client may land on any Ray actor in any round, so an
actor keeps, over rounds, the wrapped model and optimizer (one `make_private` for each actor rather
than one for each client and round) and the data of clients it has seen; a client's accountant lives
in its `Context.state`, whose history is all that Opacus needs to go on. Each actor has one thread.
The server does what Flower's `Strategy.start` does, without evaluation.
"""

import logging
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from contenders.base import Contender, Work
from contenders.turns import Turns


class FlowerOpacus(Contender):
    """Federated averaging of DP-SGD clients.

    Args:
        workers: Ray actors, one thread each.
        accountant: Opacus' name of the one that clients compute their epsilon by after each round;
            without, they only keep the history that it could be computed from.
    """

    def __init__(self, workers: int = 1, *, accountant: str | None = "rdp") -> None:
        import opacus  # noqa: F401  left out without it
        import ray  # noqa: F401

        self._workers = workers
        self._accountant = accountant
        how = "no epsilon" if accountant is None else accountant.upper()
        self.name = f"Flower on Ray + Opacus, {how}"

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        from flwr.simulation import run_simulation

        for name in ("flwr", "opacus", "ray"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._folder = tempfile.TemporaryDirectory()
        work.save_data(Path(self._folder.name))
        client = _client(work, self._folder.name, accountant=self._accountant)
        backend = {
            "init_args": {
                "address": "local",
                "num_cpus": self._workers,
                "logging_level": logging.ERROR,
                "log_to_driver": False,
                "include_dashboard": False,
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }

        def body(turns: Turns) -> None:
            server = _server(work, turns, tells=self._accountant is not None)
            run_simulation(server, client, work.clients, backend_config=backend)

        self._turns = Turns(body)

    def round(self) -> None:
        """Do one round: every client trains, the server averages."""
        self._turns.round()

    def close(self) -> None:
        """Give back what `prepare` took."""
        self._turns.stop()
        self._folder.cleanup()


def _server(work: Work, turns: Turns, *, tells: bool) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < work.clients:
            time.sleep(0.05)
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_train_nodes=work.clients,
            min_evaluate_nodes=0,
            min_available_nodes=work.clients,
        )
        arrays, number = ArrayRecord(work.build().state_dict()), 0
        while turns.go_on():
            number += 1
            requests = strategy.configure_train(number, arrays, ConfigRecord(), grid)
            answers = list(grid.send_and_receive(requests))
            _check(answers, work.clients, work.steps * number, tells=tells)
            averaged, _ = strategy.aggregate_train(number, answers)
            if averaged is None:
                raise RuntimeError("nothing to average")
            arrays = averaged
            turns.done()

    return app


def _check(answers: list[Message], clients: int, steps: int, *, tells: bool) -> None:
    """Check that the work was done: every client answered and accounted for all of its steps.

    Those that compute their epsilon must tell one.
    """
    for answer in answers:
        if answer.has_error():
            raise RuntimeError(answer.error.reason)
        told = answer.content.metric_records["metrics"]
        if told["steps"] != steps:
            raise RuntimeError(f"a client accounted for {told['steps']} of {steps} steps")
        if tells and not cast(float, told["epsilon"]) > 0:
            raise RuntimeError(f"a client tells an epsilon of {told['epsilon']}")
    if len(answers) != clients:
        raise RuntimeError(f"{len(answers)} of {clients} clients answered")


def _client(work: Work, folder: str, *, accountant: str | None) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import opacus

        # A module attribute is the one place where something outlives a message in a Ray actor.
        if not hasattr(opacus, "fedsim_benchmark"):
            opacus.fedsim_benchmark = _actor(work, folder, accountant)  # pyright: ignore[reportAttributeAccessIssue]
        step, wrapped, engine = opacus.fedsim_benchmark  # pyright: ignore[reportAttributeAccessIssue]
        wrapped.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        kept: dict[str, Any] = dict(context.state.config_records.get("account", {}))
        history = zip(*(kept.get(key, []) for key in ("noise", "rate", "steps")), strict=True)
        engine.accountant.history = list(history)
        step(int(context.node_config["partition-id"]))
        columns = [list(column) for column in zip(*engine.accountant.history, strict=True)]
        context.state["account"] = ConfigRecord(
            dict(zip(("noise", "rate", "steps"), columns, strict=True))
        )
        metrics: dict[str, Any] = {"num-examples": work.examples, "steps": sum(columns[-1])}
        if accountant is not None:
            metrics["epsilon"] = engine.get_epsilon(delta=work.delta)
        content = {
            "arrays": ArrayRecord(wrapped.state_dict()),
            "metrics": MetricRecord(metrics),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def _actor(work: Work, folder: str, accountant: str | None) -> tuple[Any, nn.Module, Any]:
    """Make what an actor keeps: a function that trains one client, the model, and the engine."""
    import warnings

    import numpy as np
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    engine, plain = PrivacyEngine(accountant=accountant or "rdp"), work.build()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=work.lr)
    x, y = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in "xy")
    data: dict[int, TensorDataset] = {}

    def examples(client: int) -> TensorDataset:
        if client not in data:
            own = slice(client * work.examples, (client + 1) * work.examples)
            data[client] = TensorDataset(*(torch.from_numpy(part[own].copy()) for part in (x, y)))
        return data[client]

    private: Any = engine.make_private(
        module=plain,
        optimizer=optimizer,
        data_loader=DataLoader(examples(0), batch_size=work.batch),
        noise_multiplier=work.noise_multiplier,
        max_grad_norm=work.max_grad_norm,
    )
    wrapped, optimizer, _ = private  # batches are drawn below, for whichever client is here
    loss, rate = nn.CrossEntropyLoss(), work.batch / work.examples

    def step(client: int) -> None:
        features, targets = examples(client).tensors
        for _ in range(work.steps):
            batch = torch.rand(work.examples) < rate
            optimizer.zero_grad()
            loss(wrapped(features[batch]), targets[batch]).backward()
            optimizer.step()

    # The hook that counts steps in the accountant was attached by `make_private`.
    return step, wrapped._module, engine
