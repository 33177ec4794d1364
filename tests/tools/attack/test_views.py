"""Estimates of what uploads, sums and the final model show of a canary."""

import math

import numpy as np
import pytest

from fedsim.experiment import load_experiment
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.attack.views import UploadDistribution, estimate_views, gaussian_pair_epsilon

DELTA = 1e-3
LAW = UploadDistribution(shift=0.4, spread=0.1, noise=1.0)
CONTENT = {
    "name": "audited",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 10, "clients_per_round": 2},
    "local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": DELTA, "max_grad_norm": 0.5},
}


def test_a_client_alone_hides_nothing_in_sums() -> None:
    rounds = [[0]] * 9 + [[]]  # a round without participants has no noise
    found = estimate_views(LAW, 0, rounds, [1.0], [3.0], delta=DELTA)
    expected = gaussian_pair_epsilon(9 * 0.4, 3.0, math.sqrt(9 + 0.9), delta=DELTA)
    assert found.uploads == pytest.approx(expected)
    assert found.sums == pytest.approx(expected)
    assert found.final_model == pytest.approx(expected)


def test_the_noise_of_others_is_that_of_a_simulated_federation() -> None:
    """Three clients of different noise and weight in half of the rounds; 10^5 runs, five errors."""
    rng = np.random.default_rng(0)
    noise, weights = [1.0, 2.0, 0.5], [1.0, 2.0, 4.0]
    participants = [[0, 1, 2], [1, 2], [0, 1], [0, 2]]
    sums = np.zeros(100_000)
    final = np.zeros(100_000)
    for members in participants:
        total = sum(weights[one] for one in members)
        mean = sum(
            weights[one] / total * math.sqrt(noise[one]) * rng.normal(size=100_000)
            for one in members
        )
        final += mean
        if 0 in members:
            sums += mean * total / weights[0]
    found = estimate_views(LAW, 0, participants, noise, weights, delta=DELTA)
    shares = [1.0 / 7.0, 1.0 / 3.0, 1.0 / 5.0]
    for value, sample, factors in (
        (found.sums, sums, [1.0] * 3),
        (found.final_model, final, shares),
    ):
        expected = LAW.epsilon(factors, float(sample.var()), delta=DELTA)
        assert value == pytest.approx(expected, rel=0.02)
    assert found.final_model < found.sums < found.uploads


def test_every_view_shows_less_than_the_claim_and_the_later_ones_less() -> None:
    """One of four clients is audited, so the noise of the others is scaled from their charges."""
    found = audit_experiment(load_experiment(CONTENT), clients=1, steps=40)
    (client,) = found.clients
    views = client.views
    assert views is not None
    assert 0.0 < views.final_model < views.sums < views.uploads < client.claim.epsilon
    shown = client.to_json()["epsilon_estimated"]
    assert shown["uploads"] == views.uploads
    assert shown["steps"] == client.findings.epsilon_estimate


def test_of_an_adapted_bound_only_the_steps_are_estimated() -> None:
    adaptive = {**CONTENT["privacy"], "clipping": {"name": "adaptive", "count_noise": 1.6}}
    found = audit_experiment(load_experiment({**CONTENT, "privacy": adaptive}), clients=1, steps=20)
    (client,) = found.clients
    assert client.views is None
    assert client.findings.epsilon_estimate > 0.0
    assert client.to_json()["epsilon_estimated"]["final_model"] is None


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"strategy": "fedavgm"}, {"ema_decay": 0.8}])
def test_the_final_model_of_another_strategy_has_no_estimate(changed: dict[str, object]) -> None:
    """Its estimate is of the sum of the rounds' mean updates, which that model is not."""
    content = {**CONTENT, "federation": {**CONTENT["federation"], **changed}}
    audit = audit_experiment(load_experiment(content), clients=1, steps=20)
    for client in audit.clients:
        views = client.views
        assert views is not None
        assert math.isnan(views.final_model)
        assert views.sums < views.uploads
