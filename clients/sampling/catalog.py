"""The samplings by their names in `privacy.sampling`."""

from collections.abc import Mapping

from fedsim.clients.sampling.divided_lots import (
    BallsAndBins,
    CyclicLots,
    CyclicPoisson,
    ShuffledEpochs,
)
from fedsim.clients.sampling.sampling import FixedSizeSampling, PoissonSampling, Sampling

SAMPLINGS: Mapping[str, type[Sampling]] = {
    cls.scheme.name: cls
    for cls in (
        PoissonSampling,
        FixedSizeSampling,
        ShuffledEpochs,
        BallsAndBins,
        CyclicLots,
        CyclicPoisson,
    )
}
