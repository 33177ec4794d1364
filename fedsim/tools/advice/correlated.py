"""Noise correlated from step to step, for the lots of the file: where it lowers the error.

At a sampling rate of 1 independent noise attains the bound of the final sum, so only sampled lots
can gain. The error of prefix sums stands for the final model's: with contraction it gains less.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedsim.accountant.accountants import AccountantName
from fedsim.clients.correlated_noise import NoiseCorrelation, prefix_error
from fedsim.clients.mechanisms.budget import calibrate_noise
from fedsim.clients.sampling.catalog import SAMPLINGS
from fedsim.clients.sampling.schemes import SamplingName
from fedsim.federation.federation import Federation
from fedsim.tools.advice.candidates import Candidate, file_candidate
from fedsim.tools.advice.facts import PublicFacts

SAMPLING = "cyclic_poisson"
_BANDS = (5, 10, 25)


def correlated_candidates(
    federation: Federation, facts: PublicFacts
) -> Iterator[tuple[Candidate, float]]:
    """Yield (candidate, ratio): the file with correlated noise, and the ratio of noise errors.

    The ratio is that of the median client, over independent noise on Poisson lots, by Rényi DP.

    Args:
        federation: of the file.
        facts: of the federation.
    """
    privacy = federation.experiment.privacy
    if privacy is None or privacy.noise_correlation != "none":
        return
    place = facts.median_place
    rounds = federation.plan.participation.planned_rounds()[facts.members[place]]
    size, steps = int(facts.examples[place]), max(1, rounds) * facts.steps
    lot, delta = max(1, round(size * facts.rates[place])), facts.deltas[place]
    for bands in _BANDS:
        if bands * lot > size:
            continue
        try:
            white, correlated = (
                predict_noise_error(
                    examples=size,
                    batch_size=lot,
                    steps=steps,
                    target_epsilon=float(facts.epsilons[place]),
                    delta=float(delta),
                    sampling="poisson" if b == 1 else SAMPLING,
                    bands=b,
                    accountant="rdp",
                )
                for b in (1, bands)
            )
        except ValueError:  # no such bands, or no noise for the target
            continue
        candidate = replace(
            file_candidate(federation.experiment, facts),
            sampling=SAMPLING,
            correlation={"name": "toeplitz", "bands": bands},
        )
        yield candidate, correlated.prefix / white.prefix


@dataclass(frozen=True)
class NoiseError:
    """The noise of a client's run, as planned.

    Attributes:
        noise_multiplier: z of the fresh noise of a step.
        prefix: root mean square error of one coordinate of the sums of the first 1 ... T clipped
            sums, in clipping bounds. Candidates with the same steps and lots compare by it.
    """

    noise_multiplier: float
    prefix: float


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
) -> NoiseError:
    """Return the error of a run with noise calibrated to a target ε under zero-out adjacency.

    No data are touched. The grid's share of the noise, below a thousandth, is left out.

    Args:
        examples: n, the client's public number of examples, at least 1.
        batch_size: expected lot, in examples; above n, n.
        steps: T, all steps of the client, at least 1.
        target_epsilon: > 0.
        delta: in (0, 1).
        sampling: how lots are drawn; with bands > 1, "cyclic_poisson" or "cyclic".
        bands: of `noise_correlation`; 1: none.
        accountant: the accountant of the target.

    Raises:
        ValueError: the sampling cannot have that many bands, or no noise meets the target.
    """
    drawn, _ = SAMPLINGS[sampling].for_client(examples, batch_size)
    spaced = drawn.spaced(bands)
    correlation = NoiseCorrelation.toeplitz(bands, steps)
    charged = calibrate_noise(
        spaced,
        steps,
        target_epsilon=target_epsilon,
        delta=delta,
        accountant=accountant,
        adjacency="zero_out",
    )
    noise = charged * correlation.column_norm
    return NoiseError(noise, noise * prefix_error(correlation.coefficients, steps))
