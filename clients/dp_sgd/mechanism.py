"""One DP-SGD step: what is released and what it costs, from one constructor."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import Gaussian, PoissonSampled
from fedsim.clients.dp_sgd.clipping import Clipping, Groups
from fedsim.clients.dp_sgd.noise import NoiseSource
from fedsim.clients.dp_sgd.per_example import LotStatistics, PerExampleGradients
from fedsim.clients.dp_sgd.sampling import PoissonSampling


@dataclass(frozen=True)
class DpSgdStep:
    """The noisy gradient of DP-SGD (Abadi et al. 2016, Algorithm 1).

    A step draws a lot by Poisson sampling with rate q, clips each example's gradient to C, sums,
    adds N(0, (z·C)²) to the sum once, and divides by the public expected lot.

    Guarantee: one step is `event`, the Poisson-sampled Gaussian mechanism, under zero-out and under
    add/remove adjacency. Every attribute is public; nothing released depends on the number of
    examples drawn except through the noisy sum, and an empty lot releases noise like any other.
    """

    sampling: PoissonSampling
    clipping: Clipping
    noise_multiplier: float
    expected_lot: float

    @property
    def event(self) -> PoissonSampled:
        """The privacy event of one step."""
        return self.sampling.event(Gaussian(self.noise_multiplier))

    def standard_deviation(self, groups: Groups) -> float:
        """Return the standard deviation of the noise on the sum, σ = z·C."""
        # z = 0 with C = ∞ (no privacy, for comparison) would be 0 · ∞.
        return self.noise_multiplier * groups.sensitivity if self.noise_multiplier > 0 else 0.0

    def release(
        self,
        gradients: PerExampleGradients,
        features: Tensor,
        targets: Tensor,
        *,
        lots: np.random.Generator,
        noise: NoiseSource,
        into: Tensor,
    ) -> LotStatistics:
        """Write one noisy gradient into the flat tensor `into` (size,).

        Args:
            gradients: the model's clipped gradient sums.
            features: all of the client's examples (n, ...).
            targets: their targets (n, ...).
            lots: the client's sampling stream of this round.
            noise: the client's noise of this round.
            into: overwritten by the released gradient.

        Returns:
            What happened to the examples of the lot: private, never to leave the client.
        """
        index = torch.from_numpy(self.sampling.lot(len(features), lots)).to(features.device)
        groups = self.clipping.groups(gradients.parameters)
        # Noise first, gradients on top: one pass over the parameters less.
        noise.fill_(into, self.standard_deviation(groups) / self.expected_lot)
        return gradients.add_clipped_sum(
            features[index],
            targets[index],
            self.clipping,
            groups,
            into,
            scale=1.0 / self.expected_lot,
        )
