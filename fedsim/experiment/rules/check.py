"""Rules that join several sections, or check names outside of the file.

A rule runs if the sections that it reads are valid; the others may have mistakes.
"""

from collections.abc import Iterator
from pathlib import Path

from fedsim.experiment.messages import PathMessage
from fedsim.experiment.references import check_name
from fedsim.experiment.rules.algorithm import check_algorithm
from fedsim.experiment.rules.clients import (
    check_budget_files,
    check_budgets,
    check_faults,
    check_participation,
    check_sampling_rate,
    check_weighting,
)
from fedsim.experiment.rules.dataset import check_data
from fedsim.experiment.rules.model import check_features, check_model, check_views
from fedsim.experiment.rules.participation import (
    check_partial_work,
    check_poisson_draws,
    check_schemes,
)
from fedsim.experiment.rules.pate import check_pate
from fedsim.experiment.rules.perturbation import check_perturbation
from fedsim.experiment.rules.scores import (
    check_early_stopping,
    check_evaluation,
    check_personalization,
    check_test_metrics,
)
from fedsim.experiment.rules.sections import Sections, messages_at
from fedsim.experiment.rules.secure import check_secure_aggregation
from fedsim.experiment.rules.trust import check_trust
from fedsim.experiment.rules.zeroth_order import check_zeroth_order
from fedsim.simulation.settings import TRACKERS, RuntimeSettings

_LR_SCHEDULE = ("local", "lr_schedule")


def check_rules(sections: Sections, base: Path) -> Iterator[PathMessage]:
    """Yield (path, message) for every broken rule.

    Args:
        sections: the valid sections.
        base: the directory in which relative paths start.
    """
    if sections.data is not None:
        yield from check_data(sections.data, base)
    if sections.model is not None:
        yield from check_model(sections.model, base)
    yield from check_features(sections)
    yield from check_algorithm(sections, base)
    yield from check_participation(sections)
    yield from check_schemes(sections)
    yield from check_partial_work(sections)
    if sections.federation is not None:
        yield from check_poisson_draws(
            sections.federation, sections.privacy, sections.secure_aggregation
        )
    yield from check_weighting(sections)
    yield from check_sampling_rate(sections)
    yield from check_perturbation(sections)
    yield from check_lr_schedule(sections)
    yield from check_budgets(sections)
    yield from check_faults(sections)
    yield from check_secure_aggregation(sections)
    yield from check_test_metrics(sections, base)
    yield from check_early_stopping(sections)
    yield from check_evaluation(sections)
    yield from check_personalization(sections)
    yield from check_views(sections)
    yield from check_pate(sections)
    yield from check_zeroth_order(sections)
    if sections.privacy is not None:
        if "secure_aggregation" not in sections.mistaken:
            yield from check_trust(
                sections.privacy,
                sections.local,
                sections.federation,
                sections.secure_aggregation,
                votes=sections.task == "pate",
            )
        yield from check_budget_files(sections.privacy, base)
    if sections.runtime is not None:
        yield from check_trackers(sections.runtime, base)


def check_trackers(runtime: RuntimeSettings, base: Path) -> Iterator[PathMessage]:
    """Yield the mistakes in `runtime.trackers` that show without importing a plug-in.

    Args:
        runtime: the section.
        base: the directory in which relative paths start.
    """
    for index, name in enumerate(runtime.trackers):
        mistake = check_name(name, "tracker", TRACKERS, base)
        yield from messages_at(("runtime", "trackers", index), mistake)


def check_lr_schedule(sections: Sections) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that a schedule of learning rates contradicts.

    A learning rate that is a part of a theorem stays as it is.

    Args:
        sections: the valid sections.
    """
    local, privacy, federation = sections.local, sections.privacy, sections.federation
    if local is None or local.lr_schedule is None:
        return
    if privacy is not None and privacy.trust.name != "local" and privacy.release_kind.draws_lots:
        yield (
            _LR_SCHEDULE,
            f"trust: {privacy.trust.name} plans the grid of all sums for one learning rate; remove "
            "lr_schedule, or use trust: local",
        )
    if federation is None:
        return
    for number in (1, federation.rounds):
        rate = local.learning_rate(number)
        if rate <= 0.0:
            yield (
                _LR_SCHEDULE,
                f"the learning rate of round {number} is {rate:g}, and that round would teach "
                "nothing at full cost; end the schedule later, or set a larger eta_min or gamma",
            )
            return
