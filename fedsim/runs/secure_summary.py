"""Facts of a run's secure aggregation, for `privacy.json` and the report."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedsim.accountant.aggregate_view import (
    AggregateView,
    RoundView,
    UploadTerms,
    aggregate_view,
    failed_conditions,
)
from fedsim.clients.budget.plan import PrivacyPlan
from fedsim.server.secure.report import SecureAggregationReport

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

ADVERSARY = (
    "sees the sums only; server and helpers follow the protocol and share no secrets, and no other "
    "client colludes with them"
)


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
        clients_sampled=federation.participation.clients_per_round,
    )
    for row in rows:
        said = row["secure_aggregation"]
        if said["aborted"] is not None:
            report.record_abort(row["round"], said["aborted"])
        elif said["survivors"]:
            report.record_success(row["round"], said["survivors"])
        report.retried += said["retried"]
    content = {
        **report.to_dict(),
        "simulated_non_collusion": one_operator,
        "clipped": sum(row["secure_aggregation"]["clipped"] for row in rows),
    }
    if federation.plans is not None:
        content["aggregate_view"] = _aggregate_view(federation, federation.plans, rows)
    return content


def upload_terms(federation: "Federation") -> UploadTerms:
    """Return how uploads came about, as theorem B asks.

    Raises:
        ValueError: a federation without privacy or without secure aggregation.
    """
    experiment, privacy = federation.experiment, federation.experiment.privacy
    if privacy is None or experiment.secure_aggregation is None:
        raise ValueError("theorem B speaks of private federations with secure aggregation")
    secure = experiment.secure_aggregation
    return UploadTerms(
        local_steps=experiment.local.steps,
        optimizer=experiment.local.optimizer.name,
        sampling=privacy.sampling,
        clipping=privacy.clipping,
        summed_securely=secure.protocol != "quantized",
        noise=privacy.noise,
        participation="fixed" if secure.range_policy == "clip" else "by_value",
    )


def _aggregate_view(
    federation: "Federation", plans: Sequence[PrivacyPlan], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the largest ε of any client against an observer of sums, or why there is none."""
    terms, privacy = upload_terms(federation), federation.experiment.privacy
    if privacy is None:
        raise ValueError("a federation without privacy has no aggregate view")
    # Theorem B does not cover a sum of clipped values.
    if any(row["secure_aggregation"]["clipped"] for row in rows):
        reasons = (*failed_conditions(terms), "values were clipped to value_bound")
        refused = AggregateView(None, reasons).to_dict()
        return {**refused, "adversary": ADVERSARY, "terms": asdict(terms)}
    scales = [_scale(federation, client) for client in range(len(plans))]
    best: dict[str, Any] | None = None
    known: dict[tuple[Any, ...], Any] = {}
    for client, views in enumerate(_views(federation, scales, rows)):
        plan = plans[client]
        counted = sorted(Counter(view.noise_multiplier for view in views).items())
        key = (tuple(counted), plan.step.sampling.sampling_rate, plan.delta)
        if key not in known:
            known[key] = aggregate_view(
                terms,
                views,
                sampling_rate=plan.step.sampling.sampling_rate,
                delta=plan.delta,
                accountant=privacy.accountant,
                adjacency=privacy.adjacency,
            )
        found = known[key]
        if found.epsilon == math.inf:
            found = AggregateView(None, ("some client adds no noise",))
        if found.epsilon is None:
            return {**found.to_dict(), "adversary": ADVERSARY, "terms": asdict(terms)}
        if best is None or found.epsilon > best["epsilon"]:
            best = {
                **found.to_dict(),
                "delta": plan.delta,
                "client": client,
                "sampling_rate": plan.step.sampling.sampling_rate,
                "noise_multipliers": [list(pair) for pair in counted],
            }
    return {**(best or {}), "adversary": ADVERSARY, "terms": asdict(terms)}


def _scale(federation: "Federation", client: int) -> float:
    """Return a_k C_k, the sensitivity of the client's summed upload to one example."""
    experiment = federation.experiment
    terms, plans = federation.client_privacy, federation.plans
    if terms is None or plans is None:
        raise ValueError("a federation without privacy has no sensitivity")
    plan = plans[client]
    rate = experiment.local.optimizer.lr / plan.step.expected_lot
    return federation.weights.values[client] * rate * terms[client].privacy.clip_norm


def _views(
    federation: "Federation", scales: Sequence[float], rows: Sequence[Mapping[str, Any]]
) -> list[list[RoundView]]:
    """Return each client's rounds, with the noise that was really in the sum.

    A lost update, or a round that a crash cut off, leaves a charge in no recorded sum. Such an
    upload counts as seen alone, protected by the client's own noise only.
    """
    plans, journal = federation.plans, federation.journal
    if plans is None or journal is None:
        raise ValueError("a private federation needs a ledger to summarise")
    noises = [s * p.step.noise_multiplier for s, p in zip(scales, plans, strict=True)]
    views: list[list[RoundView]] = [[] for _ in plans]
    for row in rows:
        if row["secure_aggregation"]["aborted"] is not None:
            continue
        summed = tuple(noises[client] for client in row["participants"])
        for client in row["participants"]:
            if scales[client] > 0:
                views[client].append(RoundView(sensitivity=scales[client], noise=summed))
    for client, own in enumerate(views):
        alone = RoundView(sensitivity=scales[client], noise=(noises[client],))
        own += [alone] * (len(journal.history(client)) - len(own))
    return views
