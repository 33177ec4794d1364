"""Loss of linear classifiers on the training examples of all clients, as publications plot it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression

from fedsim.data import load_federated_data
from fedsim.experiment import load_experiment
from fedsim.models.features.transforms import FeaturePipeline

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """All clients' training examples: features (n, values) and classes (n,)."""

    features: Floats
    classes: NDArray[np.int64]

    def loss(self, weight: Floats, bias: Floats) -> float:
        """Return the mean cross entropy of a linear model.

        Args:
            weight: (classes, values).
            bias: (classes,).
        """
        logs = log_softmax(self.features @ weight.T + bias, axis=1)
        return float(-logs[np.arange(len(self.classes)), self.classes].mean())

    def loss_of_run(self, run: Path) -> float:
        """Return the mean cross entropy of a run's final model, `name: logistic`."""
        values = {name.rsplit(".")[-1]: one for name, one in _values(run).items()}
        return self.loss(values["weight"], values["bias"])

    def least_loss(self) -> float:
        """Return the smallest mean cross entropy of any linear model."""
        best = LogisticRegression(C=np.inf, tol=1e-5, max_iter=1000)
        best.fit(self.features, self.classes)
        return self.loss(np.asarray(best.coef_), np.asarray(best.intercept_))


def pooled_examples(run: Path) -> Pooled:
    """Return the training examples of all clients of a run, after `model.features`."""
    loaded = load_experiment(run / "experiment.yaml")
    experiment = loaded.experiment
    features = experiment.model.features
    data = load_federated_data(
        experiment.data,
        seed=experiment.seed,
        base=loaded.base,
        transform=FeaturePipeline(features) if features else None,
    )
    clients = list(data.clients)
    x = np.concatenate([one.features.reshape(len(one.features), -1) for one in clients])
    classes = np.concatenate([one.targets for one in clients])
    return Pooled(features=x.astype(np.float64), classes=classes.astype(np.int64))


def _values(run: Path) -> dict[str, Floats]:
    return {name: one.astype(float) for name, one in load_file(run / "model.safetensors").items()}
