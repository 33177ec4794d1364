"""All rules, in the order of their messages."""

from collections.abc import Callable, Iterator
from inspect import signature

from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules import algorithm, clients, data, mechanisms, trust
from fedsim.experiment.rules.sections import Sections


class Rule:
    """A rule between settings, which runs once everything that it needs is known.

    Args:
        check: yields (path, message) for everything that breaks the rule. Its parameters name
            attributes of `Sections`, none of which may be None; `sections` is all of them.
    """

    def __init__(self, check: Callable[..., Iterator[PathMessage]]) -> None:
        self.check = check
        self._names = list(signature(check).parameters)

    def can_run(self, sections: Sections) -> bool:
        """Whether everything that the rule needs is known."""
        return None not in self._needs(sections).values()

    def mistakes(self, sections: Sections) -> Iterator[PathMessage]:
        """Yield (path, message) for everything that breaks the rule."""
        yield from self.check(**self._needs(sections))

    def _needs(self, sections: Sections) -> dict[str, object]:
        return {
            name: sections if name == "sections" else getattr(sections, name)
            for name in self._names
        }


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
        mechanisms.check_zeroth_order,
        trust.check_trust,
        clients.check_budget_files,
        data.check_trackers,
    )
)


def broken_rules(sections: Sections, *, checked: Sections | None = None) -> Iterator[PathMessage]:
    """Yield (path, message) for every broken rule.

    Args:
        sections: what is known.
        checked: what was known when the rules ran before; those that ran do not run again.
    """
    for rule in RULES:
        if rule.can_run(sections) and (checked is None or not rule.can_run(checked)):
            yield from rule.mistakes(sections)
