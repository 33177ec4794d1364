"""experiments/compare_digits.yaml: what it compares, and that its baseline is what it should be."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.comparison.load import load_comparison
from fedsim.comparison.statistics import t_interval
from fedsim.data import load_federated_data
from fedsim.experiment import load_experiment

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
FILE = EXPERIMENTS / "compare_digits.yaml"
ROUNDS = 40  # of the separate reference
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads the experiments of a checkout")


def test_it_compares_no_privacy_with_four_budgets_over_twenty_seeds() -> None:
    loaded = load_comparison(FILE)
    assert "#   fedsim compare experiments/compare_digits.yaml" in FILE.read_text()
    assert loaded.seeds == tuple(range(20))
    targets = {
        variant.name: privacy.target_epsilon if privacy else None
        for variant in loaded.variants
        for privacy in [variant.experiment.privacy]
    }
    assert targets == {"non-private": None, "eps-8": 8, "eps-4": 4, "eps-2": 2, "eps-1": 1}
    assert load_experiment(EXPERIMENTS / "digits_plain.yaml").experiment == (
        loaded.variants[0].experiment.model_copy(update={"name": "digits-plain"})
    )


def federated_averaging(seed: int) -> float:
    """The test accuracy of digits_mlp.yaml without privacy, written once more in plain torch.

    Only the data come from fedsim; initial model and order of batches are others.
    """
    changes = {"seed": seed, "privacy": None, "federation.rounds": ROUNDS}
    experiment = load_experiment(EXPERIMENTS / "digits_mlp.yaml", changes).experiment
    data = load_federated_data(experiment.data, seed=seed, base=EXPERIMENTS)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    batch, steps = experiment.local.batch_size, experiment.local.steps
    assert batch != "full"
    assert steps is not None
    for _ in range(experiment.federation.rounds):
        start = [parameter.detach().clone() for parameter in model.parameters()]
        total = [torch.zeros_like(parameter) for parameter in start]
        for client in data.clients:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
            passes = -(-steps * batch // len(client))
            order = torch.cat([torch.randperm(len(client)) for _ in range(passes)])
            optimizer = torch.optim.SGD(model.parameters(), lr=experiment.local.optimizer.lr)
            for step in range(steps):
                rows = order[step * batch : (step + 1) * batch].numpy()
                outputs = model(torch.from_numpy(client.features[rows]))
                loss = nn.functional.cross_entropy(outputs, torch.from_numpy(client.targets[rows]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for sum_, parameter in zip(total, model.parameters(), strict=True):
                sum_ += parameter.detach()
        with torch.no_grad():
            for parameter, sum_ in zip(model.parameters(), total, strict=True):
                parameter.copy_(sum_ / len(data.clients))
    with torch.no_grad():
        guesses = model(torch.from_numpy(data.test.features)).argmax(dim=1).numpy()
    return float((guesses == data.test.targets).mean())


@pytest.mark.slow
def test_the_interval_of_the_baseline_covers_a_separate_reference(accuracies) -> None:
    seeds = range(5)
    found = t_interval(
        accuracies(EXPERIMENTS / "digits_mlp.yaml", seeds, privacy=None, federation__rounds=ROUNDS)
    )
    reference = np.mean([federated_averaging(seed) for seed in seeds])
    assert found.low is not None
    assert found.high is not None
    assert found.low <= reference <= found.high
    assert found.high - found.low < 0.05  # an interval that covers everything says nothing
