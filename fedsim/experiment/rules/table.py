"""All rules, in the order of their messages, and the facts that they read."""

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, signature
from pathlib import Path

from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data.settings import DataSettings
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules import algorithm, clients, data, mechanisms, trust
from fedsim.experiment.schema import Experiment
from fedsim.server.settings import FederationSettings

Facts = Mapping[str, object]
"""Valid sections and what follows from them, by name; None or left out: absent, or mistaken."""


class Rule:
    """A rule between settings, which runs where all that it reads is known.

    Args:
        check: yields the mistakes. Its parameters name facts; one with a default may be unknown.
    """

    def __init__(self, check: Callable[..., Iterator[PathMessage]]) -> None:
        self.check = check
        self._reads = signature(check).parameters
        self._needs = [name for name, one in self._reads.items() if one.default is Parameter.empty]

    def can_run(self, facts: Facts) -> bool:
        """Whether all facts that the rule needs are known."""
        return all(facts.get(name) is not None for name in self._needs)

    def mistakes(self, facts: Facts) -> Iterator[PathMessage]:
        """Yield (path, message) for everything that breaks the rule."""
        known = {name: facts[name] for name in self._reads if facts.get(name) is not None}
        yield from self.check(**known)


RULES = tuple(
    Rule(check)
    for check in (
        data.check_data,
        data.check_model,
        data.check_features,
        algorithm.check_algorithm,
        algorithm.check_least_clients,
        algorithm.check_built_in_declaration,
        clients.check_participation,
        clients.check_buffered_rounds,
        clients.check_clients_of_scheme,
        clients.check_stale_updates,
        clients.check_partial_work,
        clients.check_dropped_work,
        clients.check_poisson_draws,
        clients.check_weighting,
        clients.check_max_share,
        clients.check_sampling_rate,
        mechanisms.check_perturbation,
        clients.check_lr_schedule,
        clients.check_budgets,
        clients.check_faults,
        clients.check_stragglers,
        trust.check_secure_aggregation,
        trust.check_min_clients,
        trust.check_client_keys,
        trust.check_ring,
        data.check_test_metrics,
        data.check_early_stopping,
        data.check_evaluation,
        data.check_evaluated_clients,
        data.check_personalization,
        data.check_views,
        mechanisms.check_pate,
        mechanisms.check_no_place_in_pate,
        mechanisms.check_zeroth_order,
        trust.check_trust,
        clients.check_budget_files,
        data.check_trackers,
    )
)


def facts_of(sections: Mapping[str, object], base: Path, *, unit: object = None) -> Facts:
    """Return what rules may know of an experiment.

    `num_clients` and `round_sizes` are unknown where only the data know them.

    Args:
        sections: the valid sections by name.
        base: the directory in which relative paths start.
        unit: `privacy.unit` as it is written, for a `privacy` with mistakes.
    """
    partitioned, federation = sections.get("data"), sections.get("federation")
    privacy = sections.get("privacy")
    known = isinstance(partitioned, DataSettings)
    number = partitioned.partition.num_clients if known else None
    sizes = None
    if isinstance(federation, FederationSettings):
        sizes = clients.sizes_of_rounds(federation, number)
    if isinstance(privacy, PrivacySettings):
        unit = privacy.unit
    return {
        **sections,
        "base": base,
        "mistaken": Experiment.model_fields.keys() - sections.keys(),
        "unit": unit,
        "num_clients": number,
        "round_sizes": sizes,
    }


def broken_rules(facts: Facts, *, checked: Facts | None = None) -> Iterator[PathMessage]:
    """Yield (path, message) for every broken rule.

    Args:
        facts: what is known.
        checked: what was known when the rules ran before; those that ran do not run again.
    """
    for rule in RULES:
        if rule.can_run(facts) and (checked is None or not rule.can_run(checked)):
            yield from rule.mistakes(facts)
