"""pfl-research without privacy, in an interpreter of its own since it pins other versions.

python -m venv pfl && pfl/bin/pip install "pfl[pytorch]"
PFL_PYTHON=pfl/bin/python python benchmarks/federation.py
"""

import asyncio
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend  # pyright: ignore[reportMissingImports]
from pfl.algorithm.base import NNAlgorithmParams  # pyright: ignore[reportMissingImports]
from pfl.algorithm.federated_averaging import FederatedAveraging  # pyright: ignore[reportMissingImports]
from pfl.callback.base import TrainingProcessCallback  # pyright: ignore[reportMissingImports]
from pfl.data.dataset import Dataset  # pyright: ignore[reportMissingImports]
from pfl.data.federated_dataset import FederatedDataset  # pyright: ignore[reportMissingImports]
from pfl.data.sampling import get_user_sampler  # pyright: ignore[reportMissingImports]
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # pyright: ignore[reportMissingImports]
from pfl.metrics import Metrics  # pyright: ignore[reportMissingImports]
from pfl.model.pytorch import PyTorchModel  # pyright: ignore[reportMissingImports]
from torch import nn

from contenders.base import Contender, Work
from contenders.turns import Turns

_MANY_ROUNDS = 1_000_000


class PflResearch(Contender):
    """Federated averaging of SGD clients in pfl-research's simulation."""

    name = "pfl-research"

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        self._turns = Turns(lambda turns: _run(work, turns))

    def round(self) -> None:
        """Do one round: every client trains, the server averages."""
        self._turns.round()

    def close(self) -> None:
        """Give back what `prepare` took."""
        self._turns.stop()


class _Turn(TrainingProcessCallback):
    """Waits for a round to be wanted, and says when it has ended."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, *, model: Any) -> Any:
        self._turns.go_on()
        return Metrics()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        self._turns.done()
        return not self._turns.go_on(), Metrics()


class _WithLoss(nn.Module):
    """A model with the methods that pfl-research asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features)

    def loss(self, features: Any, targets: Any, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return nn.functional.cross_entropy(
            self(torch.as_tensor(features)), torch.as_tensor(targets)
        )

    def metrics(self, features: Any, targets: Any, eval: bool = True) -> dict[str, Any]:
        return {}


def _users(work: Work) -> dict[str, Any]:
    x, y = (torch.from_numpy(part) for part in work.data())
    n = work.examples
    return {
        str(client): Dataset(
            (x[client * n : (client + 1) * n], y[client * n : (client + 1) * n]),
            user_id=str(client),
        )
        for client in range(work.clients)
    }


def _run(work: Work, turns: Turns) -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())  # it asks this thread for one
    users = _users(work)
    sampler = get_user_sampler("minimize_reuse", list(users))
    model = _WithLoss(work.build())
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=_MANY_ROUNDS,
            evaluation_frequency=_MANY_ROUNDS + 1,
            train_cohort_size=work.clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=FederatedDataset(users.__getitem__, sampler), val_data=None),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=work.batch,
            local_num_epochs=None,
            local_num_steps=work.steps,
            local_learning_rate=work.lr,
        ),
        NNEvalHyperParams(local_batch_size=None),
        [_Turn(turns)],
        send_metrics_to_platform=False,
    )
