"""Noise correlated from step to step, for the lots of the file: where it lowers the error.

At a sampling rate of 1 independent noise attains the bound of the final sum, so only sampled lots
can gain. The error of prefix sums stands for the final model's: with contraction it gains less.
"""

from collections.abc import Iterator
from dataclasses import replace

from fedsim.clients.budget.correlated_error import predict_noise_error
from fedsim.federation.federation import Federation
from fedsim.planning.advice.candidates import Candidate, file_candidate
from fedsim.planning.advice.facts import PublicFacts

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
    rounds = federation.participation.planned_rounds()[facts.members[place]]
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
