"""Advice before training: proposes settings that have a smaller predicted error at the same ε."""

from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.experiment import Experiment
from fedsim.planning import NOTHING_TO_PLAN


def why_not_advised(experiment: Experiment) -> str | None:
    """Return the reason why no advice is possible about an experiment; None if it is possible."""
    privacy = experiment.privacy
    if privacy is None:
        return NOTHING_TO_PLAN
    if not privacy.adds_noise:
        return (
            "the advice compares schedules at the same ε, and without noise ε is infinite; set "
            "privacy.target_epsilon, or a noise_multiplier above 0"
        )
    if privacy.mechanism.name != GRADIENT_PERTURBATION:
        return (
            "the advice compares schedules of noise on gradients, and privacy.mechanism is "
            f"{privacy.mechanism.name}; call it with a file of mechanism: {GRADIENT_PERTURBATION}"
        )
    groups = privacy.clipping.groups
    fixed = [name for name, group in groups.items() if group.noise_multiplier is not None]
    if fixed:
        return (
            f"privacy.clipping.groups gives {fixed[0]!r} a noise_multiplier, and advice compares "
            "schedules whose noise is calibrated to one ε; give the group a relative_noise instead"
        )
    if experiment.local.lr_schedule is not None:
        return (
            "the advice compares constant learning rates, and local.lr_schedule changes them; call "
            "it with local.lr_schedule=null"
        )
    if (privacy.trust.name, privacy.unit) != ("local", "example"):
        return (
            "the advice compares schedules of trust local with unit example, got "
            f"{privacy.trust.name} with unit {privacy.unit}; call it with privacy.trust=local and "
            "privacy.unit=example, and fedsim plan without --advise for this trust model"
        )
    if experiment.federation.partial_work is not None:
        return (
            "the advice compares whole rounds, and with partial_work some clients take fewer "
            "steps; set federation.partial_work=null for the advice"
        )
    scheme = experiment.federation.participation.scheme
    if scheme in ("trace", "buffered"):
        return (
            "the advice compares numbers of rounds in which all clients take part equally often, "
            f"got participation {scheme}; use scheme: uniform for the advice, and fedsim plan "
            "without --advise for this scheme"
        )
    return experiment.local.gradient_facts.not_advised or None
