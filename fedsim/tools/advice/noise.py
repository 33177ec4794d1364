"""Noise of candidate schedules, and the predicted noise-to-signal ratio of the trained model.

Noise: N steps with sampling rate q and noise multiplier z are close to one Gaussian release with
μ = q √(N (e^(1/z²) − 1)) (Bu, Dong, Long, Su 2020, arXiv:1911.11607, Corollary 5.4). Solved for z,
this is within 3 % of the PLD accountant's noise for the schedules compared here; at q = 1, z is
√N / μ. It carries no guarantee: a proposal's noise comes from `plan_privacy`, as in a run.
docs/howto/advice.md derives the ratio.

Correlated noise helps only for sampled batches, since at a sampling rate of 1 independent noise
attains the lower bound on the error of the final sum. Its error is measured on prefix sums of
gradients, which stand for the final model, although contraction of the training makes the gain
smaller.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.checks import Floats
from fedsim.clients.correlated_noise import NoiseCorrelation
from fedsim.clients.mechanisms.plan import Accounting, PlanRequest
from fedsim.clients.mechanisms.planner import calibrate_noise, plan_privacy
from fedsim.clients.privacy_settings import RenyiAccountantSettings
from fedsim.clients.sampling.divided_batches import SAMPLINGS
from fedsim.clients.sampling.schemes import SamplingName
from fedsim.federation.federation import Federation
from fedsim.noise.correlated.strategies import BandedStrategy
from fedsim.planning.alternatives import privacy_of
from fedsim.tools.advice.candidates import FULL, AdviceCandidate, PublicFacts

CYCLIC = "cyclic_poisson"
_BANDS = (5, 10, 25)
_NUM_DIRECTIONS = 6
_LARGEST_GROWTH, _LARGEST_RATIO = 1.2, 1e2  # clipping bounds a step that is too long


def sampling_rates(candidates: Sequence[AdviceCandidate], facts: PublicFacts) -> Floats:
    """Return sampling rates: for each candidate schedule and each of K clients, (candidates, K)."""
    rows = {None: facts.rates, FULL: np.ones(facts.num_clients)}
    return np.stack(
        [rows[c.rate] if c.rate in rows else np.full(facts.num_clients, c.rate) for c in candidates]
    )


def screening_noise(candidates: Sequence[AdviceCandidate], facts: PublicFacts) -> Floats:
    """Return approximate noise multipliers (candidates, K), with which clients spend their budgets.

    For the batches of the file, the planned noise of its schedule corrects the approximation.
    """
    share = facts.clients_per_round / facts.num_clients
    steps = np.array([[max(1.0, c.local_steps * share)] for c in candidates])
    rates = sampling_rates(candidates, facts)
    noise = _closed_form(steps, rates, facts.unit_mu)
    reference = _closed_form(max(1.0, facts.given.local_steps * share), facts.rates, facts.unit_mu)
    same_batches = np.array([[c.rate is None] for c in candidates])
    scale = facts.noise / np.maximum(reference, 1e-12)
    return np.where(same_batches & (reference > 0.0), noise * scale, noise)


def _closed_form(steps: float | Floats, rates: Floats, unit_mu: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        sampled = 1.0 / np.sqrt(np.log1p(np.square(unit_mu / rates) / steps))
        return np.where(rates == 1.0, np.sqrt(steps) / unit_mu, sampled)


def sampling_noise_ratio(
    federation: Federation, facts: PublicFacts, sampling: SamplingName
) -> float:
    """Return the noise multiplier under another sampling scheme over the file's, by Rényi DP."""
    place = facts.median_place
    client = facts.members[place]
    privacy = (federation.plan.client_privacy or ())[client].privacy
    target = {"noise_multiplier": None, "target_epsilon": float(facts.epsilons[place])}
    if privacy.accountant.name != "rdp":
        target["accountant"] = RenyiAccountantSettings(name="rdp")
    request = PlanRequest(
        privacy.model_copy(update=target),
        federation.experiment.local,
        examples=int(facts.examples[place]),
        planned_rounds=max(1, federation.plan.participation.planned_rounds()[client]),
    )
    other, given = (
        plan_privacy(replace(request, privacy=request.privacy.with_choice("sampling", name=name)))
        for name in (sampling, privacy.sampling.name)
    )
    return other.release.noise_multiplier / given.release.noise_multiplier


@dataclass(frozen=True)
class NoiseTask:
    """Unknown properties of a learning task; the advice averages over plausible values of them.

    The defaults are fitted to federations that no test and no page reports. C is the clipping
    bound, and h the length of a local step times the largest curvature.
    """

    curvature: float = 0.018  # κ, the largest curvature, in units of 1 / C
    alignment: float = 0.6  # ρ², the mean clipped gradient's squared norm over C², at the start
    spread: float = 0.1  # the smallest curvature over the largest one
    start: float = 0.0015  # squared norm of the initial model over that of the optimum
    oscillation: float = 80.0  # squared error left after steps of h = 1, times their number
    skew: float = 0.075  # squared distance between the clients' optima, per unit of label skew
    drift: float = 0.3  # squared error that a local step of h = 1 adds, per unit of label skew
    sampling: float = 0.0001  # variance of the examples' clipped gradients, over ρ² C²


# Plausible learning tasks: their curvature and alignment are near typical values.
PLAUSIBLE_TASKS = tuple(
    NoiseTask(NoiseTask.curvature * curvature, NoiseTask.alignment * alignment)
    for curvature, alignment in product((1 / 3, 1.0, 3.0), (0.4, 1.0, 2.5))
)


@dataclass(frozen=True, eq=False)
class Schedules:
    """The quantities of each candidate from which its error is predicted; arrays (candidates,).

    Client k has the weight w_k in the average, the noise multiplier z_k, the expected batch size
    L_k, the sampling rate q_k, and n_k of all n examples. The formulas are for clients that have
    the same clipping bound and all train in every round.
    """

    rounds: Floats  # T
    steps: Floats  # local, per round
    reach: Floats  # r = lr · C of a local step, with the clipping bound C
    noise: Floats  # d Σ w_k² (z_k / L_k)²: its variance in one step's average over C²; d parameters
    sampling: Floats  # Σ w_k² (1 − q_k) / L_k: of random batches, over one example's variance
    weight_skew: Floats  # Σ (w_k − n_k / n)²: squared distance of weights to shares of the examples
    label_skew: float  # as in `PublicFacts`


def noise_to_signal(schedules: Schedules, task: NoiseTask) -> Floats:
    """Return the predicted noise-to-signal ratio of each candidate for one task, (candidates,)."""
    steps = schedules.rounds * schedules.steps
    h = task.curvature * schedules.reach
    curvatures = task.spread ** np.linspace(1.0, 0.0, _NUM_DIRECTIONS)
    factor = np.minimum(np.abs(1.0 - h[:, None] * curvatures), _LARGEST_GROWTH)
    rest = np.minimum(factor ** steps[:, None], _LARGEST_RATIO)
    signals = np.clip(1.0 - rest, 1e-3, 1.0)
    signal = signals.mean(axis=1)
    growth = np.abs((1.0 - rest**2) / (1.0 - factor**2 + 1e-9)).mean(axis=1)
    variance = schedules.noise + task.sampling * schedules.sampling
    noise = variance / task.alignment * h**2 * growth
    uneven = np.square(signals).mean(axis=1) - np.square(signal)
    unstable = np.where(rest > 1.0, rest, 0.0).mean(axis=1)
    start = task.start * np.square(rest).mean(axis=1)
    bias = task.skew * schedules.weight_skew * np.square(signal)
    drift = task.drift * np.square(h * (schedules.steps - 1.0))
    error = uneven + unstable + start + noise + task.oscillation * h**4 / steps
    error += schedules.label_skew * (bias + drift)
    return error / np.square(signal)


def mean_errors(errors: Floats) -> Floats:
    """Return the geometric mean of each candidate's errors (tasks, candidates) over all tasks."""
    return np.exp(np.log(errors + 1e-3).mean(axis=0))


def correlated_candidates(
    federation: Federation, facts: PublicFacts
) -> Iterator[tuple[AdviceCandidate, float]]:
    """Yield (candidate, error ratio) for the file's schedule with correlated noise.

    The ratio is the noise error in prefix sums of gradients over that of independent noise on
    Poisson batches, both for the client of median size, with noise calibrated by Rényi DP.
    """
    if privacy_of(federation.experiment).is_correlated:
        return
    place = facts.median_place
    client = facts.members[place]
    rounds = federation.plan.participation.planned_rounds()[client]
    size, steps = int(facts.examples[place]), max(1, rounds) * facts.given.steps
    batch = max(1, round(size * facts.rates[place]))
    error = partial(
        predict_noise_error,
        examples=size,
        batch_size=batch,
        steps=steps,
        target_epsilon=float(facts.epsilons[place]),
        delta=(federation.plan.clients or ())[client].delta,
        accountant="rdp",
    )
    for bands in _BANDS:
        correlation = {"name": "toeplitz", "bands": bands}
        with suppress(ValueError):  # too many bands for the batches, or no noise for the target
            ratio = error(sampling=CYCLIC, bands=bands) / error()
            yield replace(facts.given, sampling=CYCLIC, correlation=correlation), ratio


def predict_noise_error(
    *,
    examples: int,
    batch_size: int,
    steps: int,
    target_epsilon: float,
    delta: float,
    sampling: SamplingName = "poisson",
    bands: int = 1,
    accountant: AccountantName = "pld",
) -> float:
    """Return the error in sums of gradients that noise causes which is calibrated to a target ε.

    It is the root mean square error of one coordinate over all prefix sums (the sums of the first
    t steps' clipped sums, t = 1 ... T), in units of the clip norm, under zero-out. The rounding of
    noise to integers adds less than a thousandth. Compare only plans with equal steps and batches.
    A batch has at most `examples` examples; more than one band needs sampling "cyclic_poisson" or
    "cyclic".

    Raises:
        ValueError: the sampling does not support these bands, or no noise reaches the target.
    """
    drawn, _ = SAMPLINGS[sampling].for_client(examples, batch_size)
    spaced, accounting = drawn.spaced(bands), Accounting(delta, accountant)
    correlation = NoiseCorrelation.square_root(bands, steps)
    charged = calibrate_noise(spaced, steps, target_epsilon=target_epsilon, accounting=accounting)
    strategy = BandedStrategy(correlation.coefficients)
    return charged * correlation.column_norm * strategy.prefix_error(steps).rms
