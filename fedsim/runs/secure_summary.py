"""What `privacy.json` says of secure aggregation: the protocol, its parties, and what they see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.settings import SecureAggregationSettings

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation


def secure_summary(
    federation: "Federation", rows: Sequence[Mapping[str, Any]], *, one_operator: bool
) -> dict[str, Any] | None:
    """Return `secure_aggregation` of `privacy.json`; None where updates were sent in clear.

    Args:
        federation: the federation that ran.
        rows: the lines of `rounds.jsonl`.
        one_operator: whether all parties ran in one simulation.
    """
    channel = federation.secure
    if channel is None:
        return None

    report = SecureAggregationReport(
        settings=channel.settings,
        encoder=channel.codec.encoder,
        clients_sampled=federation.plan.participation.round_sizes[1],
        plan_digest=federation.plan.digest,
        repeats_noise=_repeats_noise(federation, one_operator=one_operator),
        is_integer_sum=channel.codec.is_integers,
    )
    for row in rows:
        said = row["secure_aggregation"]
        if said["aborted"] is not None:
            report.record_abort(row["round"], said["aborted"])
        elif said["survivors"]:
            report.record_success(row["round"], said["survivors"])
        report.retried += said["retried"]
    return {
        **report.to_dict(),
        "simulated_non_collusion": one_operator,
        "clipped": sum(row["secure_aggregation"]["clipped"] for row in rows),
    }


def _repeats_noise(federation: "Federation", *, one_operator: bool) -> bool:
    """Whether a round that is repeated has the same noise again.

    A simulation with seeded noise stands for secure noise, and its server follows the protocol.
    """
    privacy = federation.experiment.privacy
    return not one_operator and (privacy is None or privacy.noise != "secure")


IMPLEMENTATION = "fedsim.secagg 1"
ENVELOPE = "RFC 9180 X25519/HKDF-SHA256/AES-256-GCM"
_TRUST = {
    "additive": "one of leader and helpers follows the protocol and colludes with no other",
    "secagg": "the server follows the protocol and colludes with fewer clients than the threshold",
    "secagg_plus": "the server follows the protocol; corrupt and dropped clients stay within the "
    "configured fractions",
    "quantized": "none: the server sees every update (control arm)",
}


@dataclass
class SecureAggregationReport:
    """Collects the facts of a run, round by round.

    Attributes:
        settings: settings of the federation.
        encoder: encoder with its computed parameters.
        clients_sampled: number of clients of a round.
        survivors: for each completed round the number of clients in the sum.
        aborted: for each aborted round the reason.
        retried: number of repeated requests to helpers.
        plan_digest: digest of the privacy plan to which uploads are bound; "" without privacy.
        repeats_noise: whether a repeated round has the same noise, which its seed gives again.
        is_integer_sum: whether uploads are integers of the noise's grid, which no value leaves out.
    """

    settings: SecureAggregationSettings
    encoder: FixedPointEncoder
    clients_sampled: int
    survivors: dict[int, int] = field(default_factory=dict)
    aborted: dict[int, str] = field(default_factory=dict)
    retried: int = 0
    plan_digest: str = ""
    repeats_noise: bool = False
    is_integer_sum: bool = False

    def record_success(self, round_number: int, survivors: int) -> None:
        """Record a round whose sum was opened.

        Args:
            round_number: number of the round, ≥ 1.
            survivors: number of clients in the sum.
        """
        self.survivors[round_number] = survivors

    def record_abort(self, round_number: int, reason: str) -> None:
        """Record an aborted round; its uploads left the clients and stay charged.

        Args:
            round_number: number of the round, ≥ 1.
            reason: text of the error.
        """
        self.aborted[round_number] = reason

    def conditions(self) -> dict[str, bool]:
        """Return which conditions of a guarantee against an active server are met.

        Reference: docs/explain/trust_models.md, "An active server".
        """
        settings = self.settings
        helped = settings.protocol.name == "additive"
        pinned = settings.keys.helper_fingerprints and settings.keys.client_fingerprints
        return {
            "pinned_keys": bool(pinned),
            "opened_once": helped and not self.repeats_noise,
            "agreed_plan": helped and bool(self.plan_digest),
            "fixed_set": helped
            and (self.is_integer_sum or settings.encoding.range_policy == "clip"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the section `secure_aggregation` of a report as JSON values."""
        settings, encoder = self.settings, self.encoder
        hidden = settings.protocol.name != "quantized"
        return {
            "protocol": settings.protocol.name,
            "implementation": IMPLEMENTATION,
            "parties": {
                "leader": "server",
                "helpers": settings.helpers,
                "clients_sampled": self.clients_sampled,
                "survivors_per_round": [self.survivors[key] for key in sorted(self.survivors)],
            },
            "trust": {
                "privacy_requires": _TRUST[settings.protocol.name],
                "active_server": "pinned_helper_keys"
                if settings.keys.helper_fingerprints
                else "not_covered",
                "malicious_clients": "undetected",
                "conditions": self.conditions(),
                "forged_clients": _forged_clients(settings, hidden=hidden),
            },
            "simulated_non_collusion": True,
            "server_view": _server_view(hidden, list(settings.metrics)),
            "encoding": {
                "ring_bits": encoder.ring_bits,
                "frac_bits": encoder.frac_bits,
                "value_bound": encoder.value_bound,
                "max_weight": encoder.max_weight,
                "max_clients": encoder.max_clients,
                "guard_bits": encoder.guard_bits,
                "rounding": encoder.rounding,
                "max_abs_error": encoder.max_abs_error,
            },
            "exactness": "equals quantised plain averaging bit for bit",
            **({"plan_digest": self.plan_digest} if self.plan_digest else {}),
            "prg": settings.prg if hidden else None,
            "envelope": ENVELOPE if hidden else None,
            "rounds": {
                "completed": len(self.survivors),
                "aborted": len(self.aborted),
                "retried": self.retried,
                "reasons": {str(key): self.aborted[key] for key in sorted(self.aborted)},
            },
        }


def _forged_clients(settings: SecureAggregationSettings, *, hidden: bool) -> str:
    """Return whether the parties notice clients that the server makes up."""
    if not hidden:
        return "not_needed"
    return "refused" if settings.keys.client_fingerprints else "undetected"


def _server_view(hidden: bool, metrics: list[str]) -> list[str]:
    if hidden:
        seen = ["sum of weighted updates", "sum of weights"]
        seen += [f"sum of weighted {name}" for name in metrics]
    else:
        seen = ["every update", "every weight", *(f"every {name}" for name in metrics)]
    return [*seen, "participant ids", "timings"]
