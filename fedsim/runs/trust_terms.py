"""Keys of `privacy.json` that depend on the trust model and the unit of a run."""

from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.trust import Trust
from fedsim.clients.local_settings import OptimizerSettings
from fedsim.experiment import Experiment
from fedsim.federation.schedule import participation_of
from fedsim.protocol.client_spend import ClientSpend

TRUST_TERMS = ("sums", "participation", "weighting", "votes")
"""Keys of `privacy.json` that `trust_terms` may return."""


def trust_terms(experiment: Experiment) -> dict[str, Any]:
    """Return the public facts that the statement of a trust model or unit needs beside its name.

    None in local trust with the example unit: its claim needs no other fact.
    """
    privacy = experiment.privacy
    if privacy is None:
        return {}
    terms: dict[str, Any] = {}
    if privacy.trust.name != "local":
        terms["sums"] = _sums(experiment)
    participation = participation_of(experiment)
    if participation.is_secret and participation.rate < 1.0:
        terms["participation"] = {"scheme": participation.scheme, "rate": participation.rate}
    terms |= experiment.task_facts.public_terms
    if privacy.release_kind.protects_client:
        terms["weighting"] = experiment.federation.weights.name
    return terms


def server_ledger(spend: ClientSpend, trust: Trust) -> PrivacyLedger | None:
    """Return a client's ledger against the server in distributed trust; None elsewhere.

    Args:
        spend: what the client has spent.
        trust: the trust model.
    """
    if trust != "distributed" or spend.rounds > 0:
        return spend.against_server
    return PrivacyLedger()


def _sums(experiment: Experiment) -> dict[str, Any]:
    privacy, secure = experiment.privacy, experiment.secure_aggregation
    sums: dict[str, Any] = {}
    if privacy is not None and privacy.trust.name == "distributed" and secure is not None:
        sums = {
            "min_clients": secure.min_clients,
            "colluding_clients": privacy.trust.colluding_clients,
        }
    if privacy is not None and not privacy.release_kind.protects_client:
        local = experiment.local
        sums |= {"local_steps": local.steps, "optimizer": _optimizer(local.optimizer)}
    return sums


def _optimizer(settings: OptimizerSettings) -> str:
    """Return the name of an optimizer; "sgd" is without momentum and weight decay."""
    if settings.name == "sgd" and (settings.momentum or settings.weight_decay):
        return "sgd with momentum or weight decay"
    return settings.name
