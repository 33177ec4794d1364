"""Table of the sampling classes, by their names in `privacy.sampling`."""

from collections.abc import Mapping

from fedsim.clients.sampling.divided_batches import (
    BallsAndBins,
    CyclicBatches,
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
        CyclicBatches,
        CyclicPoisson,
    )
}
