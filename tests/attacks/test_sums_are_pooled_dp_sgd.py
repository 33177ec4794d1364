"""A sum of shares is what one client with all data would release: central DP-SGD on pooled data.

With m = n clients, none of which colludes, equal sampling rates, bounds and factors, both have the
same law; with one honest client it is local trust to the bit. Each example's gradient is one of 32
unit vectors in the first row of the model; all other rows show noise alone.

Every check of a law rejects the right one with a probability below 1e-9. A share of 0.97 is found.
"""

from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
import yaml
from dp_accounting.pld import PLDAccountant
from scipy import stats

from fedsim.accountant import Gaussian, PoissonSampled
from fedsim.accountant.sampler_slack import SHARE, sampler_slack
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.noise import release
from fedsim.runs.runner import run_experiment

FALSE_ALARM = 1e-9
CLIENTS, EXAMPLES, BATCH, KINDS, RATE = 5, 40, 8, 32, 0.2
ROUNDS, Z, ETA = 40, 0.8, 0.5
PLUGIN = """
import numpy as np
import torch


def load(seed=0):
    x = np.zeros((202, 64), dtype=np.float32)
    x[np.arange(202), np.arange(202) % 32] = 1.0
    y = np.arange(202) % 400
    return x[:200], y[:200], x[200:], y[200:]


def build():
    return torch.nn.Linear(64, 400, bias=False)


def loss(outputs, targets):
    return outputs[:, 0]
"""


def experiment(
    base: Path, *, trust: str, clients: int, colluding: int = 0, noise: str = "seeded"
) -> dict[str, Any]:
    (base / "p.py").write_text(PLUGIN)
    content: dict[str, Any] = {
        "name": "pooled",
        "data": {"dataset": "./p.py:load", "partition": {"scheme": "iid", "num_clients": clients}},
        "model": {"name": "./p.py:build", "loss": "./p.py:loss"},
        "federation": {"rounds": ROUNDS},
        "local": {
            "steps": 1,
            "batch_size": BATCH * CLIENTS // clients,
            "optimizer": {"name": "sgd", "lr": ETA},
        },
        "privacy": {
            "trust": {"name": trust, "colluding_clients": colluding}
            if trust == "distributed"
            else trust,
            "noise_multiplier": Z,
            "noise": noise,
            "delta": 1e-3,
            "max_grad_norm": 1.0,
        },
    }
    if trust == "distributed":
        content["secure_aggregation"] = {"min_clients": clients}
    return content


def federation(base: Path, **kinds: Any) -> Federation:
    loaded = load_experiment(experiment(base, **kinds), base=base)
    return assemble(loaded, ledger=None, in_process=True)


def released(whole: Federation, number: int) -> np.ndarray:
    """Return the releases of all clients in a round (clients, size)."""
    assert whole.plan.clients is not None
    found: list[torch.Tensor] = []
    members = [
        BlockMember(
            *whole.client_task(k).data.tensors(),
            StreamKey(whole.experiment.seed, k, number),
            range(1),
            plan.release_as(DpSgdMechanism),
            plan.secure_noise,
            plan.part,
        )
        for k, plan in enumerate(whole.plan.clients)
    ]
    block_of(
        whole.model.shared,
        whole.model.loss,
        whole.model.gradients,
        whole.experiment.local,
        members,
    ).train(lambda batches, values, used: found.append(values.double().clone()))
    return found[0].numpy()


def steps_of(whole: Federation) -> np.ndarray:
    """Return the mean gradient of each round (rounds, 400, 64) times the pooled batch."""
    found = []
    for number in range(1, ROUNDS + 1):
        values = released(whole, number)
        if whole.plan.sums is None:
            mean = values.mean(0)
        else:  # the server's formula: the global model moves by unit · Σ / weights
            weights = float(sum(whole.plan.weights.values))
            mean = whole.plan.sums.unit * values.astype(np.int64).sum(0) / weights / -ETA
        found.append(mean.reshape(400, 64) * BATCH * CLIENTS)
    return np.stack(found)


def chance_below(value: np.ndarray, count: int) -> np.ndarray:
    """The law of a kind's coordinate: a binomial number of unit vectors, and the noise."""
    drawn = np.arange(count + 1)
    weights = stats.binom.pmf(drawn, count, RATE)
    return (weights * stats.norm.cdf((value[:, None] - drawn) / Z)).sum(1)


def check_law(steps: np.ndarray) -> None:
    noise = steps[:, 1:].ravel() / Z
    assert noise.size == ROUNDS * 399 * 64
    spread = stats.chi2(noise.size).cdf(float(noise @ noise))
    assert FALSE_ALARM / 2 < spread < 1 - FALSE_ALARM / 2
    assert stats.kstest(noise[::10], "norm").pvalue > FALSE_ALARM
    uniform = [
        chance_below(steps[:, 0, kind], 7 if kind < 200 % KINDS else 6) for kind in range(KINDS)
    ]
    assert stats.kstest(np.concatenate(uniform), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("noise", [pytest.param("seeded", marks=pytest.mark.slow), "secure"])
def test_five_shares_are_pooled_dp_sgd(noise: str, tmp_path: Path) -> None:
    shares = steps_of(federation(tmp_path, trust="distributed", clients=CLIENTS, noise=noise))
    pooled = steps_of(federation(tmp_path, trust="local", clients=1, noise=noise))
    check_law(shares)
    check_law(pooled)
    for rows in (slice(0, 1), slice(1, 20)):
        both = (shares[:, rows].ravel(), pooled[:, rows].ravel())
        result: Any = stats.ks_2samp(*both, method="asymp")
        assert result.pvalue > FALSE_ALARM


@pytest.mark.parametrize("factor", [0.9, pytest.param(0.97, marks=pytest.mark.slow)])
def test_a_wrong_share_has_another_law(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = release.fill_rows_

    def scaled(sources: Any, rows: torch.Tensor) -> None:
        fill(sources, rows)
        rows.mul_(factor).round_()

    monkeypatch.setattr(release, "fill_rows_", scaled)
    monkeypatch.setattr(release, "kernel", lambda: None)  # draws without that function
    with pytest.raises(AssertionError):
        check_law(steps_of(federation(tmp_path, trust="distributed", clients=CLIENTS)))


def test_one_honest_client_is_local_trust_to_the_bit(tmp_path: Path) -> None:
    """The release is float32 in local trust: 24 bits of a value below 16 deviations."""
    shared = federation(tmp_path, trust="distributed", clients=2, colluding=1)
    local = federation(tmp_path, trust="local", clients=2)
    assert shared.plan.clients is not None
    assert local.plan.clients is not None
    for one, other in zip(shared.plan.clients, local.plan.clients, strict=True):
        z = other.release.noise_multiplier
        assert z <= one.release.noise_multiplier <= z * (1 + 2**-39)
        assert one.charges(0, 3)[0][0] == one.release_as(DpSgdMechanism).event
    length = Z / 2**24 / (BATCH * CLIENTS / 2)
    for number in range(1, 6):
        integers = released(shared, number)
        assert np.array_equal(integers, np.rint(integers))
        assert np.abs(released(local, number) / length - integers).max() <= 8 + 1


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "colluding"), [(2, 1), (5, 1)])
def test_both_events_with_dp_accounting(clients: int, colluding: int, tmp_path: Path) -> None:
    """From the settings alone: q = 1/5, z of a claim that each client would have alone."""
    whole = federation(tmp_path, trust="distributed", clients=clients, colluding=colluding)
    assert whole.plan.clients is not None
    honest = clients - colluding
    plan = whole.plan.clients[0]
    for charges, z in (
        (plan.charges(0, ROUNDS), Z),
        (plan.server_charges(0, ROUNDS), Z / honest**0.5),
    ):
        ((event, count),) = charges or []
        assert count == ROUNDS
        assert isinstance(event, PoissonSampled)
        assert isinstance(event.event, Gaussian)
        ideal = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(z))
        own = dp_accounting.PoissonSampledDpEvent(
            event.sampling_rate, dp_accounting.GaussianDpEvent(event.event.noise_multiplier)
        )
        found = [
            PLDAccountant(value_discretization_interval=1e-3).compose(one, count).get_epsilon(1e-3)
            for one in (own, ideal)
        ]
        assert found[0] == pytest.approx(found[1], rel=1e-3)
        assert found[0] >= found[1] * (1 - 1e-6)  # the grid costs, and gives nothing
    assert sampler_slack(1.0, 1e-3).delta <= 1e-3 * SHARE


@pytest.mark.slow
@pytest.mark.parametrize(("trust", "clients"), [("distributed", 5), ("central", 5), ("local", 1)])
def test_whole_runs_have_one_law(trust: str, clients: int, tmp_path: Path) -> None:
    """The final model's 399 rows of noise alone are sums over all rounds, each of deviation z."""
    content = experiment(tmp_path, trust=trust, clients=clients)
    file = tmp_path / "e.yaml"
    file.write_text(yaml.safe_dump(content))
    start = federation(tmp_path, trust=trust, clients=clients).model.module.state_dict()
    final = run_experiment(file, out=tmp_path / "run").model().state_dict()
    (before,), (after,) = start.values(), final.values()
    moved = (after.double() - before.double()).numpy() * -(BATCH * CLIENTS) / ETA
    noise = moved[1:].ravel() / (Z * ROUNDS**0.5)
    spread = stats.chi2(noise.size).cdf(float(noise @ noise))
    assert FALSE_ALARM / 2 < spread < 1 - FALSE_ALARM / 2
    assert stats.kstest(noise, "norm").pvalue > FALSE_ALARM
    batches = moved[0, :KINDS].sum()  # 200 examples in 40 rounds, a fifth of them drawn
    deviation = (200 * ROUNDS * RATE * (1 - RATE) + KINDS * ROUNDS * Z**2) ** 0.5
    assert abs(batches - 200 * ROUNDS * RATE) < 6.2 * deviation  # both ends: 6e-10
