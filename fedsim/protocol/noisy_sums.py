"""The sum of a round whose parts are integers of one public grid, and what it means.

Clients put their clipped contributions on the grid, and integer noise on top of them: each client a
share of it (distributed trust), or the server all of it (central trust). The sum of integers is
exact, in plain numbers and in a ring. Everything after it is post-processing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CLIP_COUNT = "fedsim.clip-count"
"""Name of the tensor (1,) that holds the count from which adaptive `max_update_norm` learns."""


@dataclass(frozen=True)
class SumPlan:
    """Public facts of the noisy sums of a federation, the same in all rounds.

    A client sends one int64 tensor for each trained tensor of the model. Its update times its
    weight is `unit` times these integers.

    Attributes:
        unit: signed length of a step of the grid: the mean update is unit · Σ integers / Σ weights.
            With an adaptive bound S it is the length at S = 1, to be multiplied by the S of the
            round.
        bound: largest |integer| of one client in one coordinate, with its noise.
        shapes: shape of each trained tensor by name, in the order of the model.
        server_noise: whether the server adds the noise, one draw for the sum; else the clients do.
        count_unit: length of a step of the grid of `CLIP_COUNT`; None where no bound is learnt.
        divisor: a public number in place of the weights of those who came, where their number is
            secret; None elsewhere.
    """

    unit: float
    bound: int
    shapes: Mapping[str, tuple[int, ...]]
    server_noise: bool
    divisor: float | None = None
    count_unit: float | None = None
