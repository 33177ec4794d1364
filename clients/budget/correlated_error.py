"""Predicted error of noise with and without correlation, from public facts alone."""

from dataclasses import dataclass

from fedsim.accountant.accountants import AccountantName
from fedsim.clients.budget.noise_search import calibrate_noise
from fedsim.clients.correlated_noise.correlation import NoiseCorrelation, prefix_error
from fedsim.clients.sampling.catalog import SAMPLINGS
from fedsim.clients.sampling.schemes import SamplingName


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
