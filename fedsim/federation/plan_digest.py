"""Digest of a federation's privacy plan: the public facts that fix what every client releases.

Every party computes it from its own experiment. Clients bind it into their secure uploads, so a
helper opens no sum of uploads with different plans, and the policy of a node can name the plans
that its operator allows.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import fedsim
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.shared_values import map_shared
from fedsim.experiment import Experiment
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.weights import ClientWeights

_SECTIONS = ("federation", "local", "privacy")


def plan_digest(
    experiment: Experiment,
    plans: Sequence[PrivacyPlan] | None,
    weights: ClientWeights,
    sums: SumPlan | None = None,
) -> str:
    """Return the SHA-256 of the privacy plan in hex; "" without privacy.

    It covers the settings of rounds, training, privacy and secure aggregation (m, t, pinned keys),
    the grid of noisy sums, and of each client its weight, sampling rate, noise (with distributed
    trust its share), δ and number of steps. Calibrated numbers count with nine digits, since
    machines may differ in the last ones.

    Args:
        experiment: the settings.
        plans: privacy plan of each client; None without privacy.
        weights: the weights of all clients.
        sums: the plan of noisy sums; None: clients send models or their changes.
    """
    if plans is None:
        return ""
    secure = experiment.secure_aggregation
    content: dict[str, Any] = {
        "fedsim": fedsim.__version__,
        **experiment.model_dump(mode="json", include=set(_SECTIONS)),
        "secure_aggregation": None if secure is None else secure.plan(),
        "weights": list(weights.values),
        "sums": None if sums is None else [_text(sums.unit), sums.server_noise, sums.divisor],
        "clients": [*map_shared(_facts, plans)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _facts(plan: PrivacyPlan) -> list[str | int | None]:
    numbers = (plan.delta, plan.release.sampling_rate, plan.release.noise_multiplier)
    return [plan.examples, plan.steps_to_take, *map(_text, numbers)]


def _text(number: float) -> str:
    return format(number, ".9g")
