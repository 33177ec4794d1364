"""A contender: Flower's Ray simulation with Opacus in each client, as its users write it, tuned.

Tuned means: what can be kept is kept. A Flower client may land on any Ray actor in any round, so an
actor keeps, over rounds, the wrapped model and optimizer (one `make_private` for each actor rather
than one for each client and round) and the data of clients it has seen; a client's accountant lives
in its `Context.state`, whose history is all that Opacus needs to go on. Each actor has one thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

STEPS, BATCH, EXAMPLES = 4, 32, 320


@dataclass
class FlowerOpacus:
    """Federated averaging of DP-SGD clients: 4 steps of expected batch 32 from 320 examples each.

    Args:
        workers: Ray actors, one thread each.
        input_shape: shape of one example; targets are 10 classes.
    """

    workers: int = 1
    input_shape: tuple[int, ...] = (1, 28, 28)
    name: str = field(default="Flower on Ray + Opacus", init=False)

    def run(self, num_clients: int, rounds: int, model: Callable[[], nn.Module]) -> float:
        """Return the seconds of `rounds` rounds, after one more that starts everything up."""
        from flwr.simulation import run_simulation

        for name in ("flwr", "opacus", "ray"):
            logging.getLogger(name).setLevel(logging.ERROR)
        ends: list[float] = []
        run_simulation(
            _server(model, num_clients, rounds + 1, ends),
            _client(model, self.input_shape),
            num_supernodes=num_clients,
            backend_config={
                "init_args": {
                    "num_cpus": self.workers,
                    "logging_level": logging.ERROR,
                    "log_to_driver": False,
                    "include_dashboard": False,
                },
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
        if len(ends) != rounds + 1:
            raise RuntimeError(f"{len(ends)} of {rounds + 1} rounds were finished")
        return ends[-1] - ends[0]


def _server(
    model: Callable[[], nn.Module], num_clients: int, rounds: int, ends: list[float]
) -> Any:
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            """Average, and note when the round ended."""
            answers = list(replies)
            failed = [answer for answer in answers if answer.has_error()]
            if failed:
                raise RuntimeError(failed[0].error.reason)
            if len(answers) != num_clients:
                raise RuntimeError(f"{len(answers)} of {num_clients} clients answered")
            for answer in answers:
                steps = answer.content.metric_records["metrics"]["steps"]
                if steps != STEPS * server_round:
                    raise RuntimeError(f"a client accounted for {steps} steps in {server_round}")
            result = super().aggregate_train(server_round, answers)
            ends.append(time.perf_counter())
            return result

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < num_clients:
            time.sleep(0.05)
        strategy = Timed(
            fraction_evaluate=0.0,
            min_train_nodes=num_clients,
            min_evaluate_nodes=0,
            min_available_nodes=num_clients,
        )
        strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=rounds)

    return app


def _client(model: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> Any:
    """Return the ClientApp; what it needs is made inside, since it travels to the actors."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import opacus
        from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

        # A module attribute is the one place where something outlives a message in a Ray actor.

        if not hasattr(opacus, "fedsim_benchmark"):
            opacus.fedsim_benchmark = _actor(model(), input_shape)  # pyright: ignore[reportAttributeAccessIssue]
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
        content = {
            "arrays": ArrayRecord(wrapped.state_dict()),
            "metrics": MetricRecord({"num-examples": EXAMPLES, "steps": sum(columns[-1])}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def _actor(plain: nn.Module, input_shape: tuple[int, ...]) -> tuple[Any, nn.Module, Any]:
    """Make what an actor keeps: a function that trains one client, the model, and the engine."""
    import warnings

    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    engine = PrivacyEngine()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    data = {}

    def examples(client: int) -> Any:
        if client not in data:
            generator = torch.Generator().manual_seed(client)
            features = torch.randn(EXAMPLES, *input_shape, generator=generator)
            targets = torch.randint(0, 10, (EXAMPLES,), generator=generator)
            data[client] = TensorDataset(features, targets)
        return data[client]

    private: Any = engine.make_private(
        module=plain,
        optimizer=optimizer,
        data_loader=DataLoader(examples(0), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    wrapped, optimizer, _ = private  # lots are drawn below, for whichever client is here
    loss = nn.CrossEntropyLoss()

    def step(client: int) -> None:
        features, targets = examples(client).tensors
        for _ in range(STEPS):
            lot = torch.rand(EXAMPLES) < BATCH / EXAMPLES
            optimizer.zero_grad()
            loss(wrapped(features[lot]), targets[lot]).backward()
            optimizer.step()

    # The hook that counts steps in the accountant was attached by `make_private`.
    return step, wrapped._module, engine
