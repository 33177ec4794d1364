"""Rules of `task: pate`: which keys have a meaning there, and which would break its theorem."""

from collections.abc import Iterator

from fedsim.algorithms.settings import AlgorithmSettings
from fedsim.core.settings import Settings
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections
from fedsim.pate.settings import PateSettings

_UNIT = (
    "task: pate protects everything that one client has, since one teacher learns from all of it; "
    "write unit: client, without a bound: votes have a fixed size"
)
# Keys that mean the same as in other tasks; every other one must have its default.
_USED: dict[str, frozenset[str]] = {
    "federation": frozenset({"rounds", "deadline", "min_participants"}),
    "local": frozenset(
        {
            "steps",
            "batch_size",
            "max_physical_batch",
            "optimizer",
            "augmentations",
            "augment",
            "cohort",
        }
    ),
    "privacy": frozenset(
        {
            "unit",
            "trust",
            "target_epsilon",
            "noise_multiplier",
            "delta",
            "accountant",
            "clients",
        }
    ),
}
_WHY = {
    "max_update_norm": "votes have a fixed size, and nothing is clipped",
    "clipping": "votes have a fixed size, and nothing is clipped",
    "adjacency": "each query is charged for a client that is replaced, which covers one that is "
    "zeroed out",
    "noise": "a run that resumes repeats a ballot with the same noise, which noise from the "
    "operating system cannot",
    "on_exhausted": "the noise of all ballots is planned for the whole run",
    "strategy": "the server counts votes and averages no models",
    "weighting": "every teacher has one vote",
    "clients_per_round": "all teachers vote on every query",
    "participation": "all teachers vote on every query",
}
_DEFAULTS = {"strategy": AlgorithmSettings.model_validate({"name": "fedavg", "server_lr": 1.0})}
"""Defaults as they are written out."""


def check_pate(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in `task` and `pate`, and keys that have no meaning for them."""
    if sections.task != "pate":
        if sections.pate is not None:
            yield ("pate",), "belongs to task: pate; add the key, or remove the section"
        return
    if sections.pate is None and "pate" not in sections.mistaken:
        yield (
            ("task",),
            "pate needs the section pate: {queries: ..., sigma_threshold: ..., sigma: ...}",
        )
    privacy = sections.privacy
    unit = sections.unit if privacy is None else privacy.unit
    if unit != "client" and (privacy is not None or "privacy" in sections.mistaken):
        yield ("privacy", "unit"), _UNIT
    elif privacy is not None:
        yield from _check_defaults("privacy", privacy)
    if sections.local is not None:
        yield from _check_defaults("local", sections.local)
    if sections.federation is not None:
        yield from _check_defaults("federation", sections.federation)
        if sections.pate is not None:
            yield from _check_batches(sections.pate, sections.federation.rounds)
    yield from _check_other_sections(sections)


def _check_defaults(section: str, settings: Settings) -> Iterator[PathMessage]:
    """Yield the keys of a section that have no meaning for votes, and another value than none.

    Args:
        section: its name.
        settings: the section.
    """
    for key, field in type(settings).model_fields.items():
        if key in _USED[section] or getattr(settings, key) in (field.default, _DEFAULTS.get(key)):
            continue
        why = _WHY.get(key, "a teacher trains once, and then its client only votes")
        yield (section, key), f"has no place in task: pate, since {why}; remove {key}"


def _check_batches(pate: PateSettings, rounds: int) -> Iterator[PathMessage]:
    """Yield what does not divide queries and answers into batches of two rounds each."""
    if rounds % 2:
        yield (
            ("federation", "rounds"),
            f"with task: pate a batch of queries takes two rounds, a check and a vote: write an "
            f"even number, got {rounds}",
        )
        return
    if pate.most_answers > pate.queries:
        yield (
            ("pate", "answers"),
            f"must be at most pate.queries ({pate.queries:,}), got {pate.most_answers:,}",
        )
        return
    batches = rounds // 2
    for key, number in (("queries", pate.queries), ("answers", pate.most_answers)):
        path: KeyPath = ("pate", key)
        if number % batches:
            near = max(batches, number // batches * batches)
            yield (
                path,
                f"must be a multiple of {batches}, the batches in {rounds} rounds, got {number:,}; "
                f"use {near:,}, or other federation.rounds",
            )


def _check_other_sections(sections: Sections) -> Iterator[PathMessage]:
    if sections.model is not None and sections.model.loss in ("mse", "bce"):
        yield (
            ("model", "loss"),
            f"task: pate needs classes to vote for, and loss {sections.model.loss} has none; use "
            "cross_entropy",
        )
    if sections.model is not None and sections.model.has_local_base:
        yield (
            ("model",),
            "task: pate trains whole models, and this one has a part that stays on its clients; "
            "remove lora and the local base",
        )
    if sections.personalization is not None:
        yield (
            ("personalization",),
            "task: pate has no global model in the rounds from which a client could make its own; "
            "remove the section",
        )
    if sections.evaluation is not None and sections.evaluation.holdout is not None:
        yield (
            ("evaluation", "holdout"),
            "with task: pate clients score no model; remove holdout",
        )
    if sections.secure_aggregation is not None and sections.secure_aggregation.metrics:
        yield (
            ("secure_aggregation", "metrics"),
            "with task: pate clients send votes alone; remove metrics",
        )
