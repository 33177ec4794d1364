"""The values of `privacy.json` that follow from a run's settings alone ("terms").

The code that writes the file and `fedsim verify` both take these values from here. All other
figures are computed by separate code.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.trust import OBSERVERS, Trust
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.schedule import ClientPrivacy, participation_of
from fedsim.noise.correlated.run import strategy_of
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, whole_bound
from fedsim.statement.privacy_file import PrivacyFile


def recorded_terms(experiment: ExperimentWithClients) -> dict[str, Any]:
    """Return the values of `privacy.json` that follow from a run's settings, in the file's order.

    Args:
        experiment: the settings, with the number of clients.
    """
    terms = {name: term(experiment) for name, term in TERMS.items()}
    absent = PrivacyFile.__optional_keys__
    return {name: value for name, value in terms.items() if value is not None or name not in absent}


def client_terms(
    client_privacy: ClientPrivacy, plan: PrivacyPlan, clip_norm: AdaptiveClipNorm | None
) -> dict[str, Any]:
    """Return the values in a client's row of `privacy.json` that follow from the client's settings.

    All keys are in the result. `recorded_client_terms` leaves out two keys for clients to which
    they do not apply: `group_clip_norms` and `max_update_norm`.

    Args:
        client_privacy: privacy settings of the client.
        plan: privacy plan of the client. The plan's noise is not in the result, as it depends on
            the model.
        clip_norm: adaptive clip norm at the end of the run; None if the clip norm is fixed.
    """
    privacy = client_privacy.privacy
    is_client = privacy.release_kind.protects_client
    return {
        "against": OBSERVERS[privacy.trust.name][0],
        "examples": None if is_client else plan.examples,
        "delta": plan.delta,
        "target_epsilon": plan.target_epsilon,
        "sampling_rate": plan.release.sampling_rate,
        "max_grad_norm": privacy.example_bound,
        "group": client_privacy.group,
        "clip_norm": None if clip_norm is None else whole_bound(clip_norm),
        "group_clip_norms": list(clip_norm) if isinstance(clip_norm, tuple) else None,
        "max_update_norm": privacy.max_update_norm if is_client else None,
    }


def recorded_client_terms(
    client_privacy: ClientPrivacy, plan: PrivacyPlan, clip_norm: AdaptiveClipNorm | None
) -> dict[str, Any]:
    """Return the values of `client_terms` that apply to a client and are in the client's row."""
    terms = client_terms(client_privacy, plan, clip_norm)
    if not isinstance(clip_norm, tuple):
        del terms["group_clip_norms"]
    if not client_privacy.privacy.release_kind.protects_client:
        del terms["max_update_norm"]
    return terms


def server_ledger(spend: ClientSpend, trust: Trust) -> PrivacyLedger | None:
    """Return a client's ledger with the server as adversary; None unless trust is distributed.

    Args:
        spend: the client's privacy spend.
        trust: the trust model of the run.
    """
    if trust != "distributed" or spend.rounds > 0:
        return spend.against_server
    return PrivacyLedger()


def _sums(experiment: Experiment, privacy: PrivacySettings) -> dict[str, Any] | None:
    secure, sums = experiment.secure_aggregation, dict[str, Any]()
    if privacy.trust.name == "local":
        return None
    if privacy.trust.name == "distributed" and secure is not None:
        sums["min_clients"] = secure.min_clients
        sums["colluding_clients"] = privacy.trust.colluding_clients
    if not privacy.release_kind.protects_client:
        sums["local_steps"] = experiment.local.steps
        sums["optimizer"] = experiment.local.optimizer_name
    return sums


def _participation(
    experiment: ExperimentWithClients, privacy: PrivacySettings
) -> dict[str, Any] | None:
    """Return how clients are drawn in secret; None where participation is not secret."""
    participation = participation_of(experiment)
    if not participation.is_secret or participation.rate >= 1.0:
        return None
    return {"scheme": participation.scheme, "rate": participation.rate}


def _mechanism(experiment: Experiment, privacy: PrivacySettings) -> dict[str, Any] | None:
    """Return the mechanism; None where it adds noise to gradients or updates."""
    if privacy.mechanism.name == GRADIENT_PERTURBATION:
        return None
    return privacy.mechanism.model_dump(mode="json")


def _noise_correlation(
    experiment: ExperimentWithClients, privacy: PrivacySettings
) -> dict[str, Any] | None:
    """Return the correlation of noise; for whole clients with the participation that is charged."""
    correlation, separation = privacy.noise_correlation, participation_of(experiment).separation
    if correlation == "none":
        return None
    recorded = correlation.model_dump(mode="json")
    if not privacy.release_kind.protects_client or separation is None:
        return recorded
    sensitivity = strategy_of(correlation, separation).sensitivity(separation)
    return {**recorded, **asdict(separation), "sensitivity": float(f"{sensitivity:.9g}")}


_OfPrivacy = Callable[[ExperimentWithClients, PrivacySettings], Any]


def _private(term: _OfPrivacy, *, otherwise: Any = None) -> Callable[[ExperimentWithClients], Any]:
    """Return a term that is read from the privacy settings, or `otherwise` without privacy."""
    return lambda e: otherwise if e.privacy is None else term(e, e.privacy)


TERMS: Mapping[str, Callable[[ExperimentWithClients], Any]] = {
    "trust": _private(lambda _, privacy: privacy.trust.name, otherwise="local"),
    "unit": _private(lambda _, privacy: privacy.unit, otherwise="example"),
    "sums": _private(_sums),
    "participation": _private(_participation),
    "votes": _private(lambda experiment, _: experiment.task_facts.votes),
    "weighting": _private(
        lambda experiment, privacy: (
            experiment.federation.weights.name if privacy.release_kind.protects_client else None
        )
    ),
    "adjacency": _private(lambda _, privacy: privacy.adjacency.name),
    "accountant": _private(lambda _, privacy: privacy.accountant.name),
    "sampling": _private(
        lambda _, privacy: privacy.sampling.name if privacy.release_kind.draws_batches else None
    ),
    "clipping": _private(lambda _, privacy: privacy.recorded_clipping),
    "noise": _private(lambda _, privacy: privacy.noise),
    "mechanism": _private(_mechanism),
    "noise_correlation": _private(_noise_correlation),
    "public_parts": _private(lambda experiment, _: experiment.public_parts),
    "orders": _private(
        lambda _, privacy: (
            None if privacy.accountant.orders is None else list(privacy.accountant.orders)
        )
    ),
    "target_rho": _private(lambda _, privacy: privacy.accountant.target_rho),
    "personal_models": lambda experiment: experiment.personal_models,
}
"""Each term by its key in `privacy.json`; a `NotRequired` key of `PrivacyFile` is never null."""
