"""The samplings by their names in `privacy.sampling`."""

from collections.abc import Mapping

from fedsim.clients.sampling.divided_lots import (
    BallsAndBins,
    CyclicLots,
    CyclicPoisson,
    ShuffledEpochs,
)
from fedsim.clients.sampling.independent_lots import FixedSizeSampling, PoissonSampling
from fedsim.clients.sampling.sampling import Sampling

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
