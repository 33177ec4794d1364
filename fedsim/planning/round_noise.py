"""Client-level DP in central trust: which correlation of noise has the least error at the same ε.

The error is that of the models after 1, 2, ... rounds. A model is the sum of the releases of all
rounds so far; with `fedavgm`, the server's momentum is applied to the releases first. Nothing is
trained, and no data are read.
"""

import math
from dataclasses import dataclass
from functools import partial

from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency
from fedsim.clients.mechanisms.accounting import Accounting
from fedsim.clients.mechanisms.planner import calibrate_noise
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.federation.federation import Federation
from fedsim.noise.correlated.participation import SCHEME
from fedsim.noise.correlated.run import strategies_for
from fedsim.noise.correlated.strategies import INDEPENDENT
from fedsim.planning.cells import privacy_of
from fedsim.server.participation.schedules import SeparatedSchedule


@dataclass(frozen=True)
class PlannedCorrelation:
    """Noise of the models of a run, with one way to correlate it and to choose clients.

    Attributes:
        noise: name and size of the correlation (`privacy.noise_correlation`), such as "toeplitz,
            50 bands"; or "none".
        scheme: how clients are chosen (`federation.participation.scheme`); ε holds for this way.
        noise_multiplier: noise multiplier z of the fresh noise of a round.
        error: root mean square of the noise of one coordinate over the models after 1, 2, ...
            rounds, in multiples of `max_update_norm`.
        momentum: momentum of the server's optimizer; with 0 a model is the sum of the releases.
    """

    noise: str
    scheme: str
    noise_multiplier: float
    error: float
    momentum: float = 0.0


def plan_correlations(federation: Federation) -> tuple[PlannedCorrelation, ...]:
    """Return the noise of the models for each kind of noise correlation, all at the same ε.

    The result is empty unless the experiment has `trust: central`, `max_update_norm` and a target ε
    or ρ. The δ, clients, rounds and clients per round are those of the file. The ε is the smallest
    target ε of any client. For a target ρ, it is the smallest ε of the planned releases.

    Args:
        federation: the assembled federation, which has privacy.
    """
    plans, privacy = federation.plan.clients or (), privacy_of(federation.experiment)
    if privacy.trust.name != "central" or privacy.max_update_norm is None:
        return ()
    targets = [plan.target_epsilon for plan in plans if plan.target_epsilon is not None]
    if privacy.accountant.target_rho is not None:
        targets = [
            Accounting.of(privacy, plan.delta).epsilon(plan.charges(0, plan.planned_steps))
            for plan in plans
            if plan.planned_steps
        ]
    if not targets:
        return ()
    strictest = min(plans, key=lambda plan: plan.target_epsilon or math.inf)
    participation = federation.plan.participation
    return compare_correlations(
        rounds=participation.rounds,
        clients=participation.num_clients,
        clients_per_round=participation.clients_per_round,
        target_epsilon=min(targets),
        delta=strictest.delta,
        accountant=privacy.accounting,
        adjacency=privacy.adjacency.name,
        momentum=federation.experiment.federation.algorithm.momentum,
    )


def compare_correlations(
    *,
    rounds: int,
    clients: int,
    clients_per_round: int,
    target_epsilon: float,
    delta: float,
    accountant: AccountantChoice = "pld",
    adjacency: Adjacency = "zero_out",
    momentum: float = 0.0,
) -> tuple[PlannedCorrelation, ...]:
    """Return the noise of models for each kind of correlation, all at the same ε.

    Args:
        rounds: number of rounds n.
        clients: number of clients N of the federation.
        clients_per_round: number of clients k of a round, expected or exact.
        target_epsilon: ε of each client, > 0.
        delta: δ of the target, in (0, 1).
        accountant: the accountant that computes ε.
        adjacency: which data sets are neighbours.
        momentum: momentum of the server's optimizer, in [0, 1); `blt` is optimised for it.

    Raises:
        ValueError: no noise reaches the target.

    Example:
        >>> planned = compare_correlations(
        ...     rounds=100, clients=500, clients_per_round=10, target_epsilon=8.0, delta=1e-4
        ... )
        >>> min(planned, key=lambda row: row.error).noise
        'toeplitz, 50 bands'
    """
    turns = SeparatedSchedule(0, clients, clients_per_round).separation(rounds)
    noise_of = partial(
        calibrate_noise,
        target_epsilon=target_epsilon,
        accounting=Accounting(delta, accountant, adjacency),
    )
    drawn, always = PoissonSampling(min(1.0, clients_per_round / clients)), PoissonSampling(1.0)
    whole = noise_of(always, 1)
    rows = [
        ("none", "poisson", noise_of(drawn, rounds), INDEPENDENT),
        ("none", SCHEME, noise_of(always, turns.max_rounds), INDEPENDENT),
        *(
            (name, SCHEME, whole * strategy.sensitivity(turns), strategy)
            for name, strategy in strategies_for(turns, momentum)
        ),
    ]
    return tuple(
        PlannedCorrelation(
            name, scheme, noise, noise * strategy.prefix_error(rounds, momentum).rms, momentum
        )
        for name, scheme, noise, strategy in rows
    )
