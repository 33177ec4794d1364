"""Rules of `federation.strategy`: its name, its settings, and what its algorithm supports."""

from pydantic import ValidationError

from fedsim.algorithms.algorithm import Algorithm, algorithms
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import Mistakes
from fedsim.experiment.rules import (
    RoundSizes,
    Sections,
    args_messages,
    check_name,
    finite_messages,
    messages_at,
    mistake,
)
from fedsim.server.settings import FederationSettings

_PATH: KeyPath = ("federation", "strategy")


def check_algorithm(federation: FederationSettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for mistakes in the name and the settings of the algorithm.

    These include settings that a built-in algorithm declares unsupported; the declaration of a
    user's class is checked later, when the federation is assembled.
    """
    named = federation.algorithm
    place = _PATH if isinstance(federation.strategy, str) else (*_PATH, "name")
    yield from messages_at(place, check_name(named.name, "strategy", algorithms(), sections.base))
    kind = algorithms().get(named.name)
    if kind is None:
        yield from finite_messages(named.options, _PATH)
        return
    yield from args_messages(named.options, kind.Options, _PATH)
    yield from unmet_declarations(kind, federation, sections)


def built_in_algorithm(federation: FederationSettings) -> Algorithm | None:
    """Return the built-in algorithm of a federation; None for a plug-in or invalid settings.

    Args:
        federation: the `federation` section, which names the algorithm.
    """
    kind = algorithms().get(federation.algorithm.name)
    try:
        return None if kind is None else kind(federation.algorithm.options)
    except ValidationError:  # `check_algorithm` reports it
        return None


def check_least_clients(federation: FederationSettings, round_sizes: RoundSizes) -> Mistakes:
    """Yield (key path, message) if rounds have too few clients for a built-in algorithm."""
    algorithm = built_in_algorithm(federation)
    if algorithm is not None:
        yield from too_few_clients(algorithm, federation.algorithm.name, round_sizes[0])


def too_few_clients(algorithm: Algorithm, name: str, clients: int) -> Mistakes:
    """Yield (key path, message) if rounds have fewer clients than the algorithm's proof needs.

    Args:
        algorithm: the federated algorithm.
        name: the name of the algorithm in the file.
        clients: the smallest number of clients of a round; 0 if no round has clients, which other
            rules refuse.
    """
    if 0 < clients < algorithm.least_clients:
        yield mistake(
            f"federation.strategy: {name} needs at least {algorithm.least_clients} clients in a "
            f"round with these settings, got {clients}; raise federation.clients_per_round"
        )


def unmet_declarations(
    kind: type[Algorithm], federation: FederationSettings, sections: Sections
) -> Mistakes:
    """Yield (key path, message) for settings that an algorithm declares unsupported.

    Args:
        kind: the class of the algorithm.
        federation: the `federation` section, which names the algorithm.
        sections: all valid sections of the file.
    """
    name = federation.algorithm.name
    needs, privacy = _needs(kind), sections.privacy
    if needs is not None and sections.secure_aggregation is not None:
        yield mistake(
            f"federation.strategy: {name} {needs}, and secure_aggregation opens the sum alone; "
            "remove secure_aggregation, or use another strategy"
        )
    if needs is not None and privacy is not None and privacy.trust.name != "local":
        yield mistake(
            f"federation.strategy: {name} {needs}, and with trust: {privacy.trust.name} only sums "
            "may be used; use trust: local, or another strategy"
        )
    if federation.participation.scheme == "buffered" and _follows_the_round(kind):
        yield mistake(
            f"federation.strategy: {name} sends more than the model to the clients of a round, and "
            "clients of a buffer start in other rounds; use another strategy, or participation: "
            "{scheme: uniform}"
        )
    if kind.keeps_client_models and federation.ema_decay is not None:
        yield mistake(
            f"federation.ema_decay: averages global models, and with strategy {name} every client "
            "has its own, which is scored; remove ema_decay"
        )
    private = kind.private_numbers()
    if private and privacy is not None:
        yield mistake(
            f"federation.strategy: {name} needs each client's {', '.join(private)}, a function of "
            "its examples without noise, which no ε covers; use privacy: null, or another strategy"
        )
    if sections.local is not None:
        yield from _check_local(kind, name, sections.local)


def _follows_the_round(kind: type[Algorithm]) -> bool:
    """Return whether clients receive server state of the start of their round besides the model."""
    sends = any(value.to == "clients" for value in kind.wire)
    return sends or kind.start is not Algorithm.start


def _needs(kind: type[Algorithm]) -> str | None:
    """Return why an algorithm needs more than a sum with planned weights; None if it does not."""
    if kind.uses_each_update:
        return "uses each client's model by itself"
    return "weighs clients by the steps that they took" if kind.weighs_steps else None


def _check_local(kind: type[Algorithm], name: str, local: LocalSettings) -> Mistakes:
    optimizer = local.optimizer
    plain = isinstance(optimizer, SgdSettings) and not optimizer.weight_decay
    if kind.needs_plain_sgd and not (plain and not getattr(optimizer, "momentum", 0.0)):
        yield mistake(
            f"local.optimizer: must be sgd without momentum and weight_decay with strategy {name}, "
            f"which reads mean gradients off the clients' models, got {optimizer.name}"
        )
    elif kind.weighs_steps and not plain:
        yield mistake(
            f"local.optimizer: must be sgd without weight_decay with strategy {name}, whose "
            f"formula is for sgd, got {optimizer.name}"
        )
