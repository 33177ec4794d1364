"""What an audit found, client by client."""

from dataclasses import dataclass
from typing import Any

from fedsim.audit.evidence import Interval
from fedsim.audit.findings import Claim, Findings, violations
from fedsim.core.json_numbers import finite_or_none


@dataclass(frozen=True)
class ClientAudit:
    """What was found on one client, beside what it claims."""

    client: int
    examples: int
    claim: Claim
    findings: Findings

    @property
    def violations(self) -> tuple[str, ...]:
        """What does not fit the claim, in words."""
        return tuple(violations(self.findings, self.claim))

    def to_json(self) -> dict[str, Any]:
        """Return it for a program; what is infinite or unknown is null."""
        found = self.findings
        return {
            "client": self.client,
            "examples": self.examples,
            "delta": self.claim.delta,
            "epsilon_claimed": self.claim.epsilon,
            "epsilon_at_least": finite_or_none(found.epsilon),
            "noise_over_charged": _interval(found.noise),
            "contribution_over_bound": _interval(found.contribution),
            "sampling_over_charged": _interval(found.rate),
            "count_variance_over_charged": _interval(found.spread),
            "noise_correlation": [_interval(interval) for interval in found.repeated],
            "violations": list(self.violations),
        }


@dataclass(frozen=True)
class Audit:
    """What was found on the audited clients of an experiment.

    Attributes:
        name: of the experiment.
        clients: the audited ones.
        num_clients: all there are.
        steps: taken by each audited client.
        confidence: that a sound federation has no violation.
        shared: pairs of audited clients whose noise is correlated, in words.
    """

    name: str
    clients: tuple[ClientAudit, ...]
    num_clients: int
    steps: int
    confidence: float
    shared: tuple[str, ...]

    @property
    def violations(self) -> tuple[str, ...]:
        """Everything that does not fit the claims, in words."""
        own = [f"client {one.client}: {text}" for one in self.clients for text in one.violations]
        return (*own, *self.shared)

    def to_json(self) -> dict[str, Any]:
        """Return it for a program."""
        return {
            "name": self.name,
            "steps": self.steps,
            "confidence": self.confidence,
            "num_clients": self.num_clients,
            "clients": [client.to_json() for client in self.clients],
            "violations": list(self.violations),
        }


def _interval(interval: Interval) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in vars(interval).items()}
