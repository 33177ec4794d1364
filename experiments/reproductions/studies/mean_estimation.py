"""Mean-regularised private mean estimation (Liu et al. 2022): where the error is smallest.

A silo k has n values from N(w_k, σ²) around a centre w_k from N(0, τ²). It releases its mean with
example-level DP, by one step of DP-SGD with all examples from w = 0: ŵ_k. Its personal estimate is
(ŵ_k + λ w̄) / (1 + λ) with the mean w̄ of all silos.

Read at commit f16ff76 of github.com/kenziyuliu/private-cross-silo-fl; lines in `SETTINGS` are of
plot_hparam_cost.py there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experiments.reproductions.rows import Row, Unit, context_row, number_row, order_row
from experiments.reproductions.study import Setup, Study
from fedsim.accountant import calibrate_noise_multiplier
from fedsim.clients import PrivacyEngine
from fedsim.comparison.statistics import t_interval

SILOS, EXAMPLES, SIGMA, CLIP = 20, 200, 0.4, 1.0
EPSILON, DELTA = 0.25, 1e-5
TAUS = (0.03, 0.08, 0.2)
TRIALS = {"reduced": 25, "full": 50}  # of each seed: 500 federations in all at full size

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The centres of silos and their releases, each (trials, silos)."""

    centres: Floats
    releases: Floats

    def best_share(self) -> float:
        """Return the λ / (1 + λ) of the smallest squared error: that error is quadratic in it."""
        towards_mean = self.releases - self.releases.mean(1, keepdims=True)
        return float(
            ((self.releases - self.centres) * towards_mean).sum() / (towards_mean**2).sum()
        )

    def error(self, share: float) -> float:
        """Return the mean squared error of the personal estimates at a λ / (1 + λ)."""
        mean = self.releases.mean(1, keepdims=True)
        estimates = (1 - share) * self.releases + share * mean
        return float(((estimates - self.centres) ** 2).mean())


def noise_multiplier() -> float:
    """Return z of one release of all examples at (ε, δ), by Rényi DP as in the paper."""
    return calibrate_noise_multiplier(
        target_epsilon=EPSILON, delta=DELTA, sampling_rate=1.0, steps=1, accountant="rdp"
    )


def release(values: Floats, noise: float, seed: np.random.SeedSequence) -> Floats:
    """Return the private mean of each silo.

    Args:
        values: (silos, examples).
        noise: noise multiplier.
        seed: of the noise.
    """
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine(
        model,
        batch_size=values.shape[1],
        sample_size=values.shape[1],
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        batches="poisson",  # all examples, each with probability 1
        seed=seed,
    )
    engine.attach(optimizer)
    ones = torch.ones(values.shape[1], 1)
    found = []
    for own in torch.from_numpy(values.astype(np.float32)):
        nn.init.zeros_(model.weight)
        engine.backward(0.5 * (model(ones)[:, 0] - own) ** 2)
        optimizer.step()
        found.append(model.weight.item())
    return np.array(found)


def simulate(tau: float, noise: float, trials: int, seed: int) -> Trials:
    """Return trials with new centres, examples and noise.

    Args:
        tau: standard deviation of the centres.
        noise: noise multiplier of a release.
        trials: number of federations.
        seed: of everything drawn.
    """
    of_data, of_noise = np.random.SeedSequence([seed, round(tau * 1000)]).spawn(2)
    rng = np.random.default_rng(of_data)
    centres = tau * rng.standard_normal((trials, SILOS))
    values = centres[..., None] + SIGMA * rng.standard_normal((trials, SILOS, EXAMPLES))
    released = release(values.reshape(-1, EXAMPLES), noise, of_noise)
    return Trials(centres=centres, releases=released.reshape(trials, SILOS))


def closed_form(tau: float, noise: float) -> tuple[float, float]:
    """Return the optimal λ and its mean squared error, of the paper."""
    local_variance = (SIGMA**2 + (noise * CLIP) ** 2 / EXAMPLES) / EXAMPLES
    best = local_variance / tau**2
    spread = (local_variance + best**2 * tau**2) / (1 + best) ** 2
    return best, (1 - 1 / SILOS) * spread + local_variance / SILOS


def measure(setup: Setup) -> list[Row]:
    """Return optimum, error and both orders for each τ."""
    noise, rows = noise_multiplier(), []
    thousandths = Unit(scale=1000, digits=3, suffix="e-3")
    for tau in TAUS:
        best, least = closed_form(tau, noise)
        share = best / (1 + best)
        runs = [simulate(tau, noise, TRIALS[setup.size], seed) for seed in setup.seeds]
        errors = [trials.error(share) for trials in runs]
        measured = t_interval([trials.best_share() for trials in runs])
        rows += [
            number_row(
                f"τ = {tau:g}: best share λ/(1 + λ) of the mean of all silos",
                share,
                measured,
                tolerance=0.03,
                unit=Unit(digits=3),
            ),
            context_row(
                f"τ = {tau:g}: the same as λ",
                f"{measured.mean / (1 - measured.mean):.3g}, by the closed form {best:.3g}",
            ),
            number_row(
                f"τ = {tau:g}: mean squared error there",
                least,
                t_interval(errors),
                tolerance=0.1 * least,
                unit=thousandths,
            ),
            order_row(
                f"τ = {tau:g}: that error minus the smaller of those of λ = 0 and λ → ∞",
                "smaller",
                errors,
                [min(trials.error(0.0), trials.error(1.0)) for trials in runs],
                larger=False,
                unit=thousandths,
            ),
        ]
    return rows


SETTINGS = (
    "As published: 20 silos of 200 examples, σ = 0.4, τ = 0.03, 0.08 and 0.2 (README.md:83-85), "
    "clipping at 1, ε = 0.25 and δ = 1e-5 for one release of each silo (lines 18-25 and 280), "
    "noise calibrated by Rényi DP (line 284), 500 federations (line 273). The releases come from "
    "fedsim's `PrivacyEngine`, one full-batch step of DP-SGD for each silo. A seed is 50 "
    "federations (25 at reduced size), new centres and examples in each. The published value is "
    "the closed form of lines 212 and 251-252 at fedsim's noise."
)

STUDIES = {
    "mean_estimation": Study(
        title="Mean estimation: the best regularisation lies between local and global",
        source="Liu et al. 2022, arXiv:2206.07902, section 6 and figure 7",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 4, "full": 10},
        remark="the closed form leaves out clipping, which is felt at τ = 0.2",
    ),
}
