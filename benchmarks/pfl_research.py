"""A contender: pfl-research without privacy, in an interpreter of its own.

pfl-research pins other versions than fedsim, so it lives in a virtual environment beside:

    python -m venv pfl && pfl/bin/pip install "pfl[pytorch]"

This module is both sides: imported, it starts that interpreter on itself; started, it trains and
prints the seconds. The model travels as a torch file.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, BATCH, EXAMPLES = 4, 32, 320


@dataclass
class PflResearch:
    """Federated averaging of SGD clients: 4 steps of batch 32 from 320 examples each.

    Args:
        python: the interpreter that pfl-research is installed for.
        input_shape: shape of one example; targets are 10 classes.
    """

    python: Path
    input_shape: tuple[int, ...] = (1, 28, 28)
    name: str = field(default="pfl-research, no privacy", init=False)

    def run(self, num_clients: int, rounds: int, model: Callable[[], nn.Module]) -> float:
        """Return the seconds of `rounds` rounds, after one more that warms everything up."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.pt"
            torch.save(model(), path)
            arguments = [str(path), str(num_clients), str(rounds), json.dumps(self.input_shape)]
            result = subprocess.run(
                [str(self.python), str(Path(__file__).resolve()), *arguments],
                capture_output=True,
                text=True,
            )
        if result.returncode:
            raise RuntimeError(f"pfl-research failed: {result.stderr.strip().splitlines()[-1]}")
        return float(result.stdout.strip().splitlines()[-1])


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


def _seconds(model: nn.Module, clients: int, rounds: int, shape: tuple[int, ...]) -> float:
    from pfl.aggregate.simulate import SimulatedBackend  # pyright: ignore[reportMissingImports]
    from pfl.algorithm.base import NNAlgorithmParams  # pyright: ignore[reportMissingImports]
    from pfl.algorithm.federated_averaging import (  # pyright: ignore[reportMissingImports]
        FederatedAveraging,
    )
    from pfl.callback.base import (  # pyright: ignore[reportMissingImports]
        TrainingProcessCallback,
    )
    from pfl.data.dataset import Dataset  # pyright: ignore[reportMissingImports]
    from pfl.data.federated_dataset import (  # pyright: ignore[reportMissingImports]
        FederatedDataset,
    )
    from pfl.data.sampling import get_user_sampler  # pyright: ignore[reportMissingImports]
    from pfl.hyperparam import (  # pyright: ignore[reportMissingImports]
        NNEvalHyperParams,
        NNTrainHyperParams,
    )
    from pfl.metrics import Metrics  # pyright: ignore[reportMissingImports]
    from pfl.model.pytorch import PyTorchModel  # pyright: ignore[reportMissingImports]

    ends: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            ends.append(time.perf_counter())
            return False, Metrics()

    def data(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(client)
        features = torch.randn(EXAMPLES, *shape, generator=generator)
        return features, torch.randint(0, 10, (EXAMPLES,), generator=generator)

    users = {str(client): Dataset(data(client), user_id=str(client)) for client in range(clients)}
    federated = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    wrapped = _WithLoss(model)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 2,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=federated, val_data=None),
        PyTorchModel(wrapped, torch.optim.SGD, torch.optim.SGD(wrapped.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=BATCH,
            local_num_epochs=None,
            local_num_steps=STEPS,
            local_learning_rate=0.1,
        ),
        NNEvalHyperParams(local_batch_size=None),
        [Clock()],
        send_metrics_to_platform=False,
    )
    if len(ends) != rounds + 1:
        raise RuntimeError(f"{len(ends)} of {rounds + 1} rounds were finished")
    return ends[-1] - ends[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, clients, rounds, shape = sys.argv[1:]
    loaded = torch.load(path, weights_only=False)
    print(_seconds(loaded, int(clients), int(rounds), tuple(json.loads(shape))))
