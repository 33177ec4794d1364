"""One DP-SGD step: what is released and what it costs, from one constructor."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import Gaussian, PoissonSampled
from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.noise import SeededNoise
from fedsim.clients.dp_sgd.per_example import PerExampleGradients
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

    sampling_rate: float
    noise_multiplier: float
    max_grad_norm: float
    expected_lot: float

    @property
    def event(self) -> PoissonSampled:
        """The privacy event of one step."""
        return PoissonSampling(self.sampling_rate).event(Gaussian(self.noise_multiplier))

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise on the sum, σ = z·C."""
        # z = 0 with C = ∞ (no privacy, for comparison) would be 0 · ∞.
        return self.noise_multiplier * self.max_grad_norm if self.noise_multiplier > 0 else 0.0

    def gradient(
        self,
        gradients: PerExampleGradients,
        features: Tensor,
        targets: Tensor,
        *,
        lots: np.random.Generator,
        noise: SeededNoise,
    ) -> Tensor:
        """Return one noisy gradient, flat, in the order of `gradients.parameters`.

        Args:
            gradients: the model's clipped gradient sums.
            features: all of the client's examples (n, ...).
            targets: their targets (n, ...).
            lots: the client's sampling stream of this round.
            noise: the client's noise stream of this round.
        """
        chosen = PoissonSampling(self.sampling_rate).lot(len(features), lots)
        index = torch.from_numpy(chosen).to(features.device)
        total = gradients.clipped_sum(
            features[index], targets[index], FlatClipping(self.max_grad_norm)
        )
        return noise.add_(total, self.standard_deviation) / self.expected_lot
