"""Shares of clients in the average, by the weights that the server would plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.planning.advice.candidates import Candidate
from fedsim.planning.advice.facts import PublicFacts
from fedsim.server.aggregation.weights import PlanValues, plan_weights
from fedsim.server.settings import WeightingSettings

Floats = NDArray[np.float64]


def client_shares(
    candidates: Sequence[Candidate], noise: Floats, rates: Floats, facts: PublicFacts
) -> Floats:
    """Return each client's share in an average of all clients, (candidates, K), with row sums 1.

    Args:
        candidates: schedules; those that differ in their learning rate alone share their weights.
        noise: noise multipliers z, (candidates, K).
        rates: sampling rates q, (candidates, K).
        facts: of the federation.

    Raises:
        WeightingError: plan values give no weights.
    """
    known: dict[str, Floats] = {}
    rows = []
    for candidate, z, q in zip(candidates, noise, rates, strict=True):
        key = repr((candidate.weighting, candidate.rate, candidate.local_steps, candidate.sampling))
        if key not in known:
            known[key] = shares_of(candidate.weighting, z / q, facts)
        rows.append(known[key])
    return np.stack(rows)


def shares_of(weighting: str | Mapping[str, Any], noise: Floats, facts: PublicFacts) -> Floats:
    """Return each client's share under one weighting, (K,).

    Args:
        weighting: value of `federation.weighting`.
        noise: noise multipliers over sampling rates, z / q, (K,).
        facts: of the federation.

    Raises:
        WeightingError: plan values give no weights.
    """
    settings = {"name": weighting} if isinstance(weighting, str) else weighting
    clients = [PlanValues(int(n), float(z)) for n, z in zip(facts.examples, noise, strict=True)]
    planned = plan_weights(
        WeightingSettings.model_validate(settings),
        clients,
        clients_per_round=facts.clients_per_round,
    )
    weights = np.array(planned.values, dtype=np.float64)
    return weights / weights.sum()
