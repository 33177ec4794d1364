"""Probe of the release of votes before the first round: noise and size of a vote, as charged.

A client answers two ballots of each kind with the same noise: in one it votes for nothing, in the
other for one class of each query. The first is its noise, the difference of the two are its votes.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.accountant import Gaussian
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.clients.training.streams import StreamKey
from fedsim.clients.updates.votes import NO_LABEL
from fedsim.clients.voting import noisy_votes
from fedsim.federation.charged_noise import honest_draws, server_draw
from fedsim.federation.federation import Federation
from fedsim.federation.probe_evidence import NoiseEvidence
from fedsim.federation.voting import Voting
from fedsim.noise.grid import DEVIATION

_TOLERANCE = 1e-3  # of a vote's size
_ROW_VALUES = 256  # of a release, to compare it with others


def probe_votes(federation: Federation, client: int, evidence: NoiseEvidence, *, seed: int) -> None:
    """Measure a client's noise and votes in a check and in a vote.

    Args:
        federation: assembled, with ballots.
        client: the client.
        evidence: receives the measurements.
        seed: of the probe's streams, which no run uses.
    """
    voting, plans = federation.voting, federation.plans
    if voting is None or plans is None:
        return
    plan = plans[client]
    step = 1.0 if plan.part is not None or plan.update is None else plan.update.update_step
    draws = math.sqrt(honest_draws(federation.experiment))
    for number in (1, 2):
        [(event, _)] = plan.of_round(number).charges(0, 1)
        if not isinstance(event, Gaussian):
            raise TypeError(f"no noise is known for {event!r}")
        charged = event.noise_multiplier
        key = StreamKey(seed, client, number)
        silent = _votes(voting, plan, NO_LABEL, key) / (DEVIATION * step)
        one = _votes(voting, plan, 0, key) / (DEVIATION * step)
        moved = math.sqrt(2.0) * float((one - silent).abs().max()) / draws * charged
        eps = 0.0 if plan.part is not None else torch.finfo(torch.float32).eps
        rounding = 8.0 * eps * float(one.abs().max()) / draws * charged
        evidence.add_contribution(client, moved, limit=1.0 + _TOLERANCE + rounding)
        kind = "noise"
        if plan.part is not None and not plan.part.adds_noise:
            evidence.add_silence(client, silent)
            kind = f"noise of the server for client {client}"
            drawn = server_draw(federation, silent.numel(), seed=seed, number=number)
            silent = drawn.cpu() / DEVIATION
        squares = float(silent.square().sum()), silent.numel()
        evidence.add_noise(client, kind, squares, charged=charged)
        if kind == "noise":
            evidence.add_row(client, (number, 0), silent[:_ROW_VALUES])


def _votes(voting: Voting, plan: PrivacyPlan, label: int, key: StreamKey) -> Tensor:
    """Return what the client's own code makes of one label for every row, float64."""
    labels = np.full(voting.agenda.rows, label, dtype=np.int64)
    votes = noisy_votes(labels, voting.classes, plan, key)
    return torch.from_numpy(votes.astype(np.float64))
