"""Rules of `task: pate`: which keys have a meaning there, and which would break its theorem."""

from collections.abc import Iterator

from fedsim.clients.settings import PrivacySettings
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections
from fedsim.experiment.text import KeyPath
from fedsim.pate.settings import PateSettings
from fedsim.server.settings import FederationSettings

_UNIT = (
    "task: pate protects everything that one client has, since one teacher learns from all of it; "
    "write unit: client, without a bound: votes have a fixed size"
)
# Keys of privacy: the only value that has a meaning, and why.
_PRIVACY: dict[str, tuple[object, str]] = {
    "max_update_norm": (None, "votes have a fixed size, and nothing is clipped; remove it"),
    "clipping": ("flat", "votes have a fixed size, and nothing is clipped; remove clipping"),
    "adjacency": (
        "zero_out",
        "each query is charged for a client that is replaced, which covers one that is zeroed out; "
        "remove adjacency",
    ),
    "noise": (
        "seeded",
        "a run that resumes repeats a ballot with the same noise, which noise from the operating "
        "system cannot; use noise: seeded",
    ),
    "on_exhausted": (
        "refuse",
        "the noise of all ballots is planned for the whole run; use on_exhausted: refuse",
    ),
}
_FEDERATION: dict[str, tuple[object, str]] = {
    "strategy": ("fedavg", "the server counts votes and averages no models; remove strategy"),
    "server_averaging": (None, "there is no global model to average; remove server_averaging"),
    "clients_per_round": (None, "all teachers vote on every query; remove clients_per_round"),
}


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
    if sections.privacy is not None:
        yield from _check_privacy(sections.privacy)
    elif "privacy" in sections.mistaken and sections.unit in (None, "example"):
        yield ("privacy", "unit"), _UNIT
    if sections.federation is not None:
        yield from _check_federation(sections.federation)
        if sections.pate is not None:
            yield from _check_batches(sections.pate, sections.federation.rounds)
    yield from _check_other_sections(sections)


def _check_privacy(privacy: PrivacySettings) -> Iterator[PathMessage]:
    if privacy.unit != "client":
        yield ("privacy", "unit"), _UNIT
        return
    for key, (value, why) in _PRIVACY.items():
        if getattr(privacy, key) != value:
            yield ("privacy", key), f"with task: pate {why}"


def _check_federation(federation: FederationSettings) -> Iterator[PathMessage]:
    named = {key: getattr(federation, key) for key in _FEDERATION}
    named["strategy"] = federation.algorithm.name
    if federation.algorithm.options.get("server_lr", 1.0) != 1.0:
        named["strategy"] = "fedavg with another server_lr"
    for key, (value, why) in _FEDERATION.items():
        if named[key] != value:
            yield ("federation", key), f"with task: pate {why}"
    if federation.participation.scheme != "uniform":
        yield (
            ("federation", "participation"),
            "with task: pate all teachers vote on every query; remove participation",
        )
    if not federation.weights.is_uniform:
        yield (
            ("federation", "weighting"),
            "with task: pate every teacher has one vote; use weighting: uniform",
        )


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
