"""A draft entry of the public registry of deployments (registry.opendp.org), from runs.

The keys are those of the registry's template of 2026. Facts that the run's records have are filled
in; facts that only people know stay empty.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedsim.accountant.trust import CLAIMED_AGAINST
from fedsim.core.formatting import epsilon_text
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.tools.totals.sources import Source, SourceError
from fedsim.tools.totals.totals import Totals

_OF_ONE_RUN = frozenset(("guarantee", "result", "delta", "budget", "limit", "mechanism"))
_UNITS = {"example": "Example-level", "client": "Client-level"}
_MODELS = {observer: trust.title() for trust, observer in CLAIMED_AGAINST.items()}


def registry_entry(account: Totals, sources: Sequence[Source]) -> str:
    """Return an entry of the registry as YAML, for a person to complete.

    It has the privacy totals, and facts on the last finished run.

    Guarantee: ε is rounded up and δ is the accounted one, so the entry claims no more than the
    total does.

    Args:
        account: the privacy totals.
        sources: the sources of the totals.

    Raises:
        SourceError: no source is a finished run, or a client has an infinite ε.
    """
    runs = [source for source in sources if source.is_run and source.is_finished]
    if not runs:
        raise SourceError("--registry needs the directory of a run that has ended")
    if account.to_json()["system_epsilon"] is None:
        raise SourceError("--registry: the largest ε is infinite, which is nothing to register")
    last = RunFiles(RunDirectory.open(Path(runs[-1].name)))
    name = last.experiment.name
    entry = {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "deployment",
        "deployment": _deployment(account, last),
    }
    head = (
        "# A draft for https://registry.opendp.org, written by fedsim totals.\n"
        "# Fill in the empty fields, and check each sentence.\n"
    )
    if any(source.seed is not None for source in sources):
        head += (
            "# The noise was seeded: this was a simulation, not a deployment. Register a run with\n"
            "# privacy.noise: secure.\n"
        )
    return head + yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)


def _deployment(account: Totals, run: RunFiles) -> dict[str, Any]:
    text = _sentences(run, of_one_run=len(account.sources) == 1)
    metrics = [
        f"{key.replace('_', ' ')} {value:.4g}"
        for key, value in run.summary.items()
        if key.startswith("test_") and isinstance(value, float)
    ]
    return {
        "basic": {
            "name": run.experiment.name,
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
            "unprotected_quantities": text("adjacency", "data access"),
        },
        "privacy_loss": _privacy_loss(account, text),
        "deployment_model": _deployment_model(account, text),
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": "",
            "mechanisms": text("mechanism", "sampling"),
            "composition": text("accounting", "budget"),
            "post_processing": "",
            "justification": "",
            "utility": ", ".join(metrics),
            "additional_information": text("recomputation", "limit"),
        },
        "administrative": {
            "evidence_sources": {},
            "status": "Draft",
            "registry_authors": [""],
            "tier": 2,
        },
    }


def _sentences(run: RunFiles, *, of_one_run: bool) -> Callable[..., str]:
    """Return a function from topics of a run's privacy statement to their sentences, joined.

    Sentences with numbers of one run are left out if there are several runs.
    """
    sentences: dict[str, list[str]] = {}
    for point in run.privacy.get("statement_points") or []:
        if of_one_run or point["point"] not in _OF_ONE_RUN:
            sentences.setdefault(point["point"], []).append(point["text"])
    return lambda *topics: " ".join(text for topic in topics for text in sentences.get(topic, []))


def _privacy_loss(account: Totals, text: Callable[..., str]) -> dict[str, Any]:
    largest, unit = account.largest, account.unit or "example"
    details = (
        f"ε of the client with the largest one, of {len(account.clients)}, over "
        f"{len(account.sources)} training runs; by fedsim's {next(iter(largest.epsilons))} "
        "accountant, an upper bound"
    )
    return {
        "privacy_unit": _UNITS.get(unit, unit),
        "privacy_unit_details": text("unit", "adjacency"),
        "number_of_privacy_units": 1,
        "privacy_parameters": {
            "epsilon": float(epsilon_text(largest.epsilon)),
            "delta": largest.delta,
        },
        "privacy_parameters_details": f"{details}. {text('result', 'delta')}".strip(),
    }


def _deployment_model(account: Totals, text: Callable[..., str]) -> dict[str, Any]:
    releases = sum(count for _, count in account.largest.ledger.entries)
    return {
        "model_name": _MODELS.get(account.observer or "server", ""),
        "model_name_details": text("guarantee"),
        "trust_assumptions": text("threat model"),
        "actors": f"{len(account.clients)} clients, which hold the data, and a server",
        "release_type": "Many releases",
        "release_type_details": f"{len(account.sources)} training runs; up to {releases} noisy "
        "releases of one client",
        "data_source_type": "Static",
        "data_source_type_details": "",
        "access_type": "Non-interactive",
        "access_type_details": "",
    }
