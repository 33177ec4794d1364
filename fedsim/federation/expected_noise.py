"""Length of the noise in the aggregate update of a round, from public plan values.

The noise that was drawn stays secret: beside a release, its length would say something about the
examples. Its expected length is a function of the plan, and in many dimensions nearly as exact: the
squared length of d normal values deviates by a share of √(2 / d).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.noise.grid import DEVIATION
from fedsim.protocol.noisy_sums import LearntBound, SumPlan, whole_bound


@dataclass(frozen=True)
class SumNoise:
    """The noise in the mean of a noisy sum.

    Attributes:
        sums: the plan of the sums.
        weights: weight of each client.
        clip_norm: S of the first round, where a bound is learnt.
        size: d, trained values of the model.
    """

    sums: SumPlan
    weights: Sequence[int]
    clip_norm: float
    size: int

    def norm(
        self,
        steps: Mapping[int, int],
        clip_norms: Mapping[int, LearntBound],
        round_number: int = 1,
    ) -> float | None:
        """Return the expected L2 norm; None for a sum of nothing.

        Guarantee: where the divisor is public, it does not depend on who took part.

        Args:
            steps: by participant; a sum has one release of each.
            clip_norms: learnt bounds; empty before the first, or where the bound is fixed.
            round_number: not used: the noise of a sum is the same in every round.
        """
        divisor = self.sums.divisor
        members = [client for client in steps if self.weights[client]]
        if divisor is None:
            divisor = float(sum(self.weights[client] for client in members))
        if not divisor:
            return None
        draws = 1 if self.sums.server_noise else len(members)
        bound = 1.0
        if self.sums.count_unit is not None:  # the unit is the length at S = 1
            bound = whole_bound(clip_norms.get(0, self.clip_norm))
        deviation = abs(self.sums.unit) * DEVIATION * bound * math.sqrt(draws)
        return deviation * math.sqrt(self.size) / divisor


@dataclass(frozen=True)
class ClientNoise:
    """The noise in the mean of updates to which each client adds its own.

    Attributes:
        variances: of each client, expected squared length of the noise of one release; None where
            it is not known what becomes of it.
        bounds: of each client, the clipping bound that the variance is for; 0: it does not adapt.
        weights: weight of each client.
        local: local training; its learning rate of a round, over `local.optimizer.lr`, scales the
            noise of steps. None: the noise of a round does not depend on it.
    """

    variances: tuple[float | None, ...]
    bounds: tuple[float, ...]
    weights: Sequence[int]
    local: LocalSettings | None = None

    @classmethod
    def of(
        cls,
        plans: Sequence[PrivacyPlan],
        weights: Sequence[int],
        parameters: FlatParameters,
        local: LocalSettings,
    ) -> Self:
        """Return the noise of clients with local trust.

        Noise of a step of DP-SGD moves the model by the learning rate times its value. That it also
        moves the gradients of later steps of the round is left out, a second-order effect. An
        optimizer with moments, or correlated noise, adds up steps in another way: not known.

        Args:
            plans: the plan of each client.
            weights: weight of each client.
            parameters: of the model.
            local: local training.
        """
        optimizer = local.optimizer
        is_plain = isinstance(optimizer, SgdSettings) and not optimizer.momentum
        lr = optimizer.lr if is_plain else None
        known = [plan.release.release_variance(parameters, lr, plan.round_steps) for plan in plans]
        bounds = tuple(whole_bound(plan.release.adapted_clip_norm or 0.0) for plan in plans)
        scales = local.lr_schedule is not None and not any(
            plan.release.protects_client for plan in plans
        )
        return cls(tuple(known), bounds, weights, local if scales else None)

    def norm(
        self,
        steps: Mapping[int, int],
        clip_norms: Mapping[int, LearntBound],
        round_number: int = 1,
    ) -> float | None:
        """Return the expected L2 norm; None where it is not known.

        Args:
            steps: steps of each participant.
            clip_norms: adapted bound of each client.
            round_number: the round ≥ 1.
        """
        divisor = sum(self.weights[client] for client in steps)
        terms = []
        for client, taken in steps.items():
            variance, bound = self.variances[client], self.bounds[client]
            if variance is None:
                return None
            scale = whole_bound(clip_norms.get(client, bound)) / bound if bound else 1.0
            terms.append(taken * variance * (self.weights[client] * scale) ** 2)
        if not divisor:
            return None
        norm = math.sqrt(math.fsum(terms)) / divisor
        if self.local is None:
            return norm
        return norm * self.local.learning_rate(round_number) / self.local.optimizer.lr
