"""The values of `privacy.json` that follow from a run's settings alone ("terms").

The code that writes the file and `fedsim verify` both take these values from here. All other
figures are computed by separate code.
"""

from dataclasses import asdict
from typing import Any

from fedsim.accountant.trust import OBSERVERS
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.schedule import ClientPrivacy, participation_of
from fedsim.noise.correlated.run import strategy_of
from fedsim.protocol.noisy_sums import AdaptiveClipNorm, whole_bound
from fedsim.statement.privacy_file import PrivacyFile


def recorded_terms(experiment: ExperimentWithClients) -> dict[str, Any]:
    """Return the values of `privacy.json` that follow from a run's settings, in the file's order.

    A `NotRequired` key of `PrivacyFile` is absent where it does not apply.
    """
    privacy, personal = experiment.privacy, experiment.personalization
    personal_models = None if personal is None else personal.method
    if privacy is None:
        unknown = dict.fromkeys(("adjacency", "accountant", "sampling", "clipping", "noise"))
        return {"trust": "local", "unit": "example", **unknown, "personal_models": personal_models}
    kind, orders = privacy.release_kind, privacy.accountant.orders
    adds_elsewhere = privacy.mechanism.name != GRADIENT_PERTURBATION
    terms = {
        "trust": privacy.trust.name,
        "unit": privacy.unit,
        "sums": _sums(experiment, privacy),
        "participation": _participation(experiment),
        "votes": experiment.task_facts.votes,
        "weighting": experiment.federation.weights.name if kind.protects_client else None,
        "adjacency": privacy.adjacency.name,
        "accountant": privacy.accountant.name,
        "sampling": privacy.sampling.name if kind.draws_batches else None,
        "clipping": privacy.recorded_clipping,
        "noise": privacy.noise,
        "mechanism": privacy.mechanism.model_dump(mode="json") if adds_elsewhere else None,
        "noise_correlation": _noise_correlation(experiment, privacy),
        "public_parts": experiment.public_parts,
        "orders": None if orders is None else list(orders),
        "target_rho": privacy.accountant.target_rho,
        "personal_models": personal_models,
    }
    absent = PrivacyFile.__optional_keys__
    return {name: value for name, value in terms.items() if value is not None or name not in absent}


def client_terms(
    client_privacy: ClientPrivacy, plan: PrivacyPlan, clip_norm: AdaptiveClipNorm | None
) -> dict[str, Any]:
    """Return the values in a client's row of `privacy.json` that follow from the client's settings.

    The plan's noise is not among them, as it depends on the model. `clip_norm` is the adaptive one
    at the end of the run; None if it is fixed.
    """
    privacy = client_privacy.privacy
    is_client = privacy.release_kind.protects_client
    terms = {
        "against": OBSERVERS[privacy.trust.name][0],
        "examples": None if is_client else plan.examples,
        "delta": plan.delta,
        "target_epsilon": plan.target_epsilon,
        "sampling_rate": plan.release.sampling_rate,
        "max_grad_norm": privacy.example_bound,
        "group": client_privacy.group,
        "clip_norm": None if clip_norm is None else whole_bound(clip_norm),
    }
    if isinstance(clip_norm, tuple):
        terms["group_clip_norms"] = list(clip_norm)
    if is_client:
        terms["max_update_norm"] = privacy.max_update_norm
    return terms


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


def _participation(experiment: ExperimentWithClients) -> dict[str, Any] | None:
    """Return how clients are drawn in secret; None where participation is not secret."""
    participation = participation_of(experiment)
    if not participation.is_secret or participation.rate >= 1.0:
        return None
    return {"scheme": participation.scheme, "rate": participation.rate}


def _noise_correlation(
    experiment: ExperimentWithClients, privacy: PrivacySettings
) -> dict[str, Any] | None:
    """Return the correlation of noise; for whole clients with the participation that is charged."""
    correlation, separation = privacy.noise_correlation, participation_of(experiment).separation
    if correlation.name == "none":
        return None
    recorded = correlation.model_dump(mode="json")
    if not privacy.release_kind.protects_client or separation is None:
        return recorded
    sensitivity = strategy_of(correlation, separation).sensitivity(separation)
    return {**recorded, **asdict(separation), "sensitivity": float(f"{sensitivity:.9g}")}
