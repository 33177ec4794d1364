"""Facts of a run's secure aggregation, for `privacy.json` and the report."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    from fedsim.server.secure.report import SecureAggregationReport

    report = SecureAggregationReport(
        settings=channel.settings,
        encoder=channel.codec.encoder,
        clients_sampled=federation.participation.round_sizes[1],
        plan_digest=federation.plan_digest,
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
