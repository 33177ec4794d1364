"""Correlated noise of one run with privacy of whole clients: its strategy and its charges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedsim.accountant import Event, SelfComposed
from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.noise.correlated.blt import BltStrategy, optimised_blt
from fedsim.noise.correlated.settings import (
    BltSettings,
    CorrelationSettings,
    MinSeparation,
    ToeplitzSettings,
)
from fedsim.noise.correlated.strategies import (
    INDEPENDENT,
    BandedStrategy,
    NoiseStrategy,
    TreeStrategy,
    square_root_coefficients,
)
from fedsim.noise.sources import effective_multiplier


@dataclass(frozen=True)
class RunCorrelation:
    """Noise strategy and participation bound of a run, which fix the privacy cost of a client.

    Attributes:
        strategy: how the noise of rounds is correlated.
        participation: bound on the rounds of every client.
    """

    strategy: NoiseStrategy
    participation: MinSeparation

    @property
    def planned_steps(self) -> int:
        """Largest number of releases of one client, all charged before the first one."""
        return self.participation.max_rounds

    @property
    def rounds_apart(self) -> int:
        """Smallest difference between two rounds of one client."""
        return self.participation.rounds_apart

    @cached_property
    def column_norm(self) -> float:
        """Noise multiplier of a round's fresh noise, divided by that of the whole run.

        It is the sensitivity of the strategy, an L2 norm.
        """
        return self.strategy.sensitivity(self.participation)

    def effective_multiplier(self, noise_multiplier: float, dimensions: int, error: float) -> float:
        """Return the noise multiplier, rounded down, of all releases of the run about one client.

        Args:
            noise_multiplier: noise multiplier z of the fresh noise of a round.
            dimensions: number of values of a release.
            error: rounding error of an update before it is rounded to integers, in clip norms.
        """
        roundings = self.strategy.extra_roundings(self.participation) if dimensions else 0
        return effective_multiplier(
            noise_multiplier, dimensions, error, column_norm=self.column_norm, bands=1 + roundings
        )


def charges_of_run(
    whole: Sequence[tuple[Event, int]], planned_steps: int, first_step: int, steps: int
) -> list[tuple[Event, int]]:
    """Return the privacy events of further releases with correlated noise: (event, count) pairs.

    The whole run is charged with the first release, and later ones cost nothing.

    Args:
        whole: (event, count) pairs of all planned releases of the run.
        planned_steps: number of planned releases.
        first_step: number of earlier releases.
        steps: number of further releases.

    Raises:
        ValueError: the releases go beyond the plan.
    """
    if first_step + steps > planned_steps:
        raise ValueError(
            f"correlated noise is charged for {planned_steps} releases of a client, and "
            f"{first_step + steps} are requested"
        )
    return [(SelfComposed(*pair), 1) for pair in whole] if steps and not first_step else []


def strategy_of(settings: CorrelationSettings, participation: MinSeparation) -> NoiseStrategy:
    """Return the strategy of correlated noise that the settings choose for a run.

    Args:
        settings: value of `privacy.noise_correlation` other than none.
        participation: bound on the rounds of every client.
    """
    if isinstance(settings, BltSettings):
        if settings.scales is None or settings.decays is None:
            return optimised_blt(settings.buffers, participation)
        return BltStrategy(tuple(settings.scales), tuple(settings.decays))
    if isinstance(settings, ToeplitzSettings):
        return BandedStrategy(square_root_coefficients(settings.bands))
    return TreeStrategy(participation.rounds) if settings.name == "tree" else INDEPENDENT


def strategies_for(
    participation: MinSeparation, momentum: float = 0.0
) -> Iterator[tuple[str, NoiseStrategy]]:
    """Yield the noise strategies worth comparing for a run, as pairs (description, strategy).

    A description is a name with a size, such as `blt, 4 buffers`.

    Args:
        participation: bound on the rounds of every client.
        momentum: momentum of the server's optimizer, in [0, 1).
    """
    yield "tree", TreeStrategy(participation.rounds)
    bands = min(participation.rounds_apart, participation.rounds, MAX_NOISE_BANDS)
    if bands > 1:
        yield f"toeplitz, {bands} bands", BandedStrategy(square_root_coefficients(bands))
    for buffers in (2, 4):
        yield f"blt, {buffers} buffers", optimised_blt(buffers, participation, momentum)


def with_parameters(
    settings: CorrelationSettings, participation: MinSeparation | None, momentum: float = 0.0
) -> CorrelationSettings:
    """Return settings in which the open parameters of `blt` have the best values for a run.

    Settings of other kinds, or with parameters of their own, are returned unchanged.

    Args:
        settings: the settings of a file.
        participation: bound on the rounds of every client; None leaves the parameters open.
        momentum: momentum of the server's optimizer, in [0, 1).
    """
    if not isinstance(settings, BltSettings) or settings.scales or participation is None:
        return settings
    best = optimised_blt(settings.buffers, participation, momentum)
    return settings.model_copy(update={"scales": [*best.scales], "decays": [*best.decays]})
