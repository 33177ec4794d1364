"""Advice before training: proposes settings that have a smaller predicted error at the same ε."""

from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.experiment import Experiment
from fedsim.planning import NOTHING_TO_PLAN


def why_not_advised(experiment: Experiment) -> str | None:
    """Return the reason why no advice is possible about an experiment; None if it is possible.

    Args:
        experiment: the experiment; only its settings are read.
    """
    privacy, federation = experiment.privacy, experiment.federation
    if privacy is None:
        return NOTHING_TO_PLAN
    groups, mechanism = privacy.clipping.groups, privacy.mechanism.name
    is_other = mechanism != GRADIENT_PERTURBATION
    fixed = [name for name, group in groups.items() if group.noise_multiplier is not None]
    trust, scheme = (privacy.trust.name, privacy.unit), federation.participation.scheme
    reasons = {
        "the advice compares schedules at the same ε, and without noise ε is infinite; set "
        "privacy.target_epsilon, or a noise_multiplier above 0": not privacy.adds_noise,
        "the advice compares schedules of noise on gradients, and privacy.mechanism is "
        f"{mechanism}; call it with a file of mechanism: {GRADIENT_PERTURBATION}": is_other,
        f"privacy.clipping.groups gives {next(iter(fixed), '')!r} a noise_multiplier, and advice "
        "compares schedules whose noise is calibrated to one ε; give the group a relative_noise "
        "instead": bool(fixed),
        "the advice compares constant learning rates, and local.lr_schedule changes them; call it "
        "with local.lr_schedule=null": experiment.local.lr_schedule is not None,
        "the advice compares schedules of trust local with unit example, got "
        f"{' with unit '.join(trust)}; call it with privacy.trust=local and privacy.unit=example, "
        "and fedsim plan without --advise for this trust model": trust != ("local", "example"),
        "the advice compares whole rounds, and with partial_work some clients take fewer steps; "
        "set federation.partial_work=null for the advice": federation.partial_work is not None,
        "the advice compares numbers of rounds in which all clients take part equally often, got "
        f"participation {scheme}; use scheme: uniform for the advice, and fedsim plan without "
        "--advise for this scheme": scheme in ("trace", "buffered"),
    }
    others = experiment.local.gradient_facts.not_advised or None
    return next((reason for reason, holds in reasons.items() if holds), others)
