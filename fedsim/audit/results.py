"""Results of an audit, client by client."""

from dataclasses import dataclass
from typing import Any

from fedsim.audit.evidence import Interval
from fedsim.audit.findings import Claim, Findings, violations
from fedsim.audit.observers import Against
from fedsim.audit.views import Views
from fedsim.core.text_formats import finite_or_none


@dataclass(frozen=True)
class ClientAudit:
    """The findings on one client, beside its claim against one observer.

    Attributes:
        client: the client.
        num_examples: number of its examples.
        claim: its claim.
        findings: the measurements.
        views: estimates for three attackers of a run; None where nothing was seen, or where the
            noise is that of a sum.
        against: the observer.
    """

    client: int
    num_examples: int
    claim: Claim
    findings: Findings
    views: Views | None = None
    against: Against = "server"

    @property
    def violations(self) -> tuple[str, ...]:
        """A message for each finding that contradicts the claim."""
        return tuple(violations(self.findings, self.claim))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value; an infinite or unknown number is null."""
        found = self.findings
        return {
            "client": self.client,
            "against": self.against,
            "examples": self.num_examples,
            "delta": self.claim.delta,
            "epsilon_claimed": self.claim.epsilon,
            "epsilon_certified": finite_or_none(found.epsilon),
            "epsilon_certified_of_runs": finite_or_none(found.epsilon_of_runs),
            "epsilon_estimated": {
                "steps": finite_or_none(found.epsilon_estimate),
                "uploads": None if self.views is None else finite_or_none(self.views.uploads),
                "sums": None if self.views is None else finite_or_none(self.views.sums),
                "final_model": None
                if self.views is None
                else finite_or_none(self.views.final_model),
            },
            "noise_over_charged": _interval_json(found.noise),
            "noise_distance_to_gaussian": _interval_json(found.noise_distance),
            "contribution_over_bound": _interval_json(found.contribution),
            "sampling_over_charged": _interval_json(found.sampling_rate),
            "count_variance_over_charged": _interval_json(found.count_variance),
            "noise_correlation": [
                _interval_json(interval) for interval in found.noise_correlations
            ],
            "violations": list(self.violations),
        }


@dataclass(frozen=True)
class Audit:
    """The findings on the audited clients of an experiment.

    Attributes:
        name: name of the experiment.
        clients: results of the audited clients, one for each observer.
        num_clients: number of all clients of the federation.
        steps: number of steps of each audited client.
        confidence: probability that a correct federation has no violation.
        shared_noise: a message for each pair of audited clients with correlated noise.
    """

    name: str
    clients: tuple[ClientAudit, ...]
    num_clients: int
    steps: int
    confidence: float
    shared_noise: tuple[str, ...]

    @property
    def violations(self) -> tuple[str, ...]:
        """A message for each finding that contradicts a claim."""
        own = [
            f"client {one.client}{_AGAINST[one.against]}: {text}"
            for one in self.clients
            for text in one.violations
        ]
        return (*own, *self.shared_noise)

    @property
    def num_audited(self) -> int:
        """Number of audited clients."""
        return len({one.client for one in self.clients})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value."""
        return {
            "name": self.name,
            "steps": self.steps,
            "confidence": self.confidence,
            "num_clients": self.num_clients,
            "clients": [client.to_json() for client in self.clients],
            "violations": list(self.violations),
        }


_AGAINST: dict[Against, str] = {"server": "", "sums": ", in sums", "models": ", in models"}


def _interval_json(interval: Interval) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in vars(interval).items()}
