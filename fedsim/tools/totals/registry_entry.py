"""A draft entry of the public registry of deployments (registry.opendp.org), from runs.

The keys are those of the registry's template of 2026. Facts that the run's records have are filled
in; facts that only people know stay empty.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.core.formatting import epsilon_text
from fedsim.runs.directory import RunDirectory
from fedsim.tools.totals.sources import Source, SourceError
from fedsim.tools.totals.totals import Totals

_OF_ONE_RUN = frozenset(("guarantee", "result", "delta", "budget", "limit", "mechanism"))


@dataclass(frozen=True)
class RegistryFacts:
    """The facts about a deployment that an entry of the registry states.

    Attributes:
        name: name of the experiment.
        account: privacy totals of the clients.
        points: sentences of the privacy statement, by topic.
        releases: text with the numbers of training runs and of noisy releases.
        utility: text with the test metrics of the final model.
        is_simulation: whether a run had seeded noise.
    """

    name: str
    account: Totals
    points: Mapping[str, str]
    releases: str
    utility: str
    is_simulation: bool

    def text(self, *points: str) -> str:
        """Return the privacy statement's sentences on some topics, joined; "" if there are none."""
        return " ".join(self.points[point] for point in points if point in self.points)


def facts_of(account: Totals, sources: Sequence[Source]) -> RegistryFacts:
    """Return the facts for a registry entry: privacy totals, and facts on the last finished run.

    Args:
        account: the privacy totals.
        sources: the sources of the totals.

    Raises:
        SourceError: no source is a finished run, or a client has an infinite ε.
    """
    runs = [source for source in sources if source.terms is not None and source.is_finished]
    if not runs:
        raise SourceError("--registry needs the directory of a run that has ended")
    if account.to_json()["system_epsilon"] is None:
        raise SourceError("--registry: the largest ε is infinite, which is nothing to register")
    last = RunDirectory.open(Path(runs[-1].name))
    privacy, summary = last.read_json("privacy.json"), last.read_json("summary.json")
    releases = sum(count for _, count in account.largest.ledger.entries)
    name = "" if runs[-1].terms is None else runs[-1].terms.name
    return RegistryFacts(
        name,
        account,
        _points(privacy.get("statement_points") or [], of_one_run=len(account.sources) == 1),
        f"{len(account.sources)} training runs; up to {releases} noisy releases of one client",
        ", ".join(
            f"{key.replace('_', ' ')} {value:.4g}"
            for key, value in summary.items()
            if key.startswith("test_") and isinstance(value, float)
        ),
        any(source.terms is not None and source.terms.seed is not None for source in sources),
    )


def _points(points: Sequence[Mapping[str, Any]], *, of_one_run: bool) -> dict[str, str]:
    """Return the sentences by topic; those with numbers of one run only if there is one run."""
    sentences: dict[str, str] = {}
    for point in points:
        name = point["point"]
        if name in _OF_ONE_RUN and not of_one_run:
            continue
        sentences[name] = (
            f"{sentences[name]} {point['text']}" if name in sentences else point["text"]
        )
    return sentences


_UNITS = {"example": "Example-level", "client": "Client-level"}
_MODELS = {observer: trust.title() for trust, observer in CLAIMED_AGAINST.items()}


def registry_entry(facts: RegistryFacts) -> str:
    """Return an entry of the registry as YAML, for a person to complete.

    Guarantee: ε is rounded up and δ is the accounted one, so the entry claims no more than the
    total does.
    """
    entry = {
        "url_slug": _slug(facts.name),
        "deployment": {
            "basic": {
                "name": facts.name,
                "data_curators": [{"data_curator_name": "", "data_curator_type": ""}],
                "description": "",
                "intended_use": "",
                "data_product_type": "Machine learning model",
                "data_product_region": "",
                "data_product_sector": "",
                "publication_date": "",
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": "",
                "unprotected_quantities": facts.text("adjacency", "data access"),
            },
            "privacy_loss": _privacy_loss(facts),
            "deployment_model": _deployment_model(facts),
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "",
                "mechanisms": facts.text("mechanism", "sampling"),
                "composition": facts.text("accounting", "budget"),
                "post_processing": "",
                "justification": "",
                "utility": facts.utility,
                "additional_information": facts.text("recomputation", "limit"),
            },
            "administrative": {
                "evidence_sources": {},
                "status": "Draft",
                "registry_authors": [""],
                "tier": 2,
            },
        },
    }
    head = (
        "# A draft for https://registry.opendp.org, written by fedsim totals.\n"
        "# Fill in the empty fields, and check each sentence.\n"
    )
    if facts.is_simulation:
        head += (
            "# The noise was seeded: this was a simulation, not a deployment. Register a run with\n"
            "# privacy.noise: secure.\n"
        )
    return head + yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)


def _privacy_loss(facts: RegistryFacts) -> dict[str, Any]:
    account, largest = facts.account, facts.account.largest
    unit = account.unit or "example"
    details = (
        f"ε of the client with the largest one, of {len(account.clients)}, over "
        f"{len(account.sources)} training runs; by fedsim's {next(iter(largest.epsilons))} "
        "accountant, an upper bound"
    )
    return {
        "privacy_unit": _UNITS.get(unit, unit),
        "privacy_unit_details": facts.text("unit", "adjacency"),
        "number_of_privacy_units": 1,
        "privacy_parameters": {
            "epsilon": float(epsilon_text(largest.epsilon)),
            "delta": largest.delta,
        },
        "privacy_parameters_details": f"{details}. {facts.text('result', 'delta')}".strip(),
    }


def _deployment_model(facts: RegistryFacts) -> dict[str, Any]:
    return {
        "model_name": _MODELS.get(facts.account.observer or "server", ""),
        "model_name_details": facts.text("guarantee"),
        "trust_assumptions": facts.text("threat model"),
        "actors": f"{len(facts.account.clients)} clients, which hold the data, and a server",
        "release_type": "Many releases",
        "release_type_details": facts.releases,
        "data_source_type": "Static",
        "data_source_type_details": "",
        "access_type": "Non-interactive",
        "access_type_details": "",
    }


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "deployment"
