"""A draft entry of the public registry of deployments (registry.opendp.org), from runs.

The keys are those of the registry's template of 2026. A run fills in what its records say; what
only people know stays empty. docs/howto/account.md maps the keys.
"""

import re

import yaml

from fedsim.account.facts import RunFacts
from fedsim.core.formatting import epsilon_text

_UNITS = {"example": "Example-level", "client": "Client-level"}
_MODELS = {"server": "Local", "sums": "Distributed", "models": "Central"}


def registry_entry(facts: RunFacts) -> str:
    """Return an entry of the registry as YAML, for a person to complete.

    Guarantee: ε is rounded up and δ is the accounted one, so the entry claims no more than the
    total does.
    """
    account, largest = facts.account, facts.account.largest
    spent = {"epsilon": float(epsilon_text(largest.epsilon)), "delta": largest.delta}
    details = (
        f"ε of the client with the largest one, of {len(account.clients)}, over "
        f"{len(account.sources)} training runs; by fedsim's {next(iter(largest.epsilons))} "
        "accountant, an upper bound"
    )
    unit = account.unit or "example"
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
            "privacy_loss": {
                "privacy_unit": _UNITS.get(unit, unit),
                "privacy_unit_details": facts.text("unit", "adjacency"),
                "number_of_privacy_units": 1,
                "privacy_parameters": spent,
                "privacy_parameters_details": f"{details}. {facts.text('result', 'delta')}".strip(),
            },
            "deployment_model": {
                "model_name": _MODELS.get(account.observer or "server", ""),
                "model_name_details": facts.text("guarantee"),
                "trust_assumptions": facts.text("threat model"),
                "actors": f"{len(account.clients)} clients, which hold the data, and a server",
                "release_type": "Many releases",
                "release_type_details": facts.releases,
                "data_source_type": "Static",
                "data_source_type_details": "",
                "access_type": "Non-interactive",
                "access_type_details": "",
            },
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
        "# A draft for https://registry.opendp.org, written by fedsim account.\n"
        "# Fill in the empty fields, and check each sentence.\n"
    )
    if facts.is_simulation:
        head += (
            "# The noise was seeded: this was a simulation, not a deployment. Register a run with\n"
            "# privacy.noise: secure.\n"
        )
    return head + yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "deployment"
