"""Rules of `federation.strategy`: its name, its settings, and what its algorithm supports."""

from pydantic import ValidationError

from fedsim.algorithms.algorithm import Algorithm, algorithms
from fedsim.clients.local_settings import SgdSettings
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
    """Return the built-in algorithm of a federation; None for a plug-in or invalid settings."""
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
    """Yield (key path, message) if the smallest round has fewer clients than the proof needs."""
    if 0 < clients < algorithm.least_clients:  # other rules refuse rounds without clients
        needed = f"at least {algorithm.least_clients} clients in a round with these settings"
        fix = "raise federation.clients_per_round"
        yield mistake(f"federation.strategy: {name} needs {needed}, got {clients}; {fix}")


def unmet_declarations(
    kind: type[Algorithm], federation: FederationSettings, sections: Sections
) -> Mistakes:
    """Yield (key path, message) for settings that an algorithm declares unsupported."""
    name, privacy = federation.algorithm.name, sections.privacy
    needs = "weighs clients by the steps that they took" if kind.weighs_steps else None
    if kind.uses_each_update:
        needs = "uses each client's model by itself"
    if needs is not None and sections.secure_aggregation is not None:
        why = f"{name} {needs}, and secure_aggregation opens the sum alone"
        fix = "remove secure_aggregation, or use another strategy"
        yield mistake(f"federation.strategy: {why}; {fix}")
    if needs is not None and privacy is not None and privacy.trust.name != "local":
        why = f"{name} {needs}, and with trust: {privacy.trust.name} only sums may be used"
        yield mistake(f"federation.strategy: {why}; use trust: local, or another strategy")
    sends = any(value.to == "clients" for value in kind.wire) or kind.start is not Algorithm.start
    if federation.participation.scheme == "buffered" and sends:
        why = f"{name} sends more than the model to the clients of a round"
        buffer = "clients of a buffer start in other rounds"
        fix = "use another strategy, or participation: {scheme: uniform}"
        yield mistake(f"federation.strategy: {why}, and {buffer}; {fix}")
    if kind.keeps_client_models and federation.ema_decay is not None:
        why = f"with strategy {name} every client has its own, which is scored"
        yield mistake(f"federation.ema_decay: averages global models, and {why}; remove ema_decay")
    private = kind.private_numbers()
    if private and privacy is not None:
        why = f"{name} needs each client's {', '.join(private)}"
        what = "a function of its examples without noise, which no ε covers"
        yield mistake(f"federation.strategy: {why}, {what}; use privacy: null, or another strategy")
    if sections.local is None:
        return
    optimizer = sections.local.optimizer
    plain = isinstance(optimizer, SgdSettings) and not optimizer.weight_decay
    if kind.needs_plain_sgd and not (plain and not getattr(optimizer, "momentum", 0.0)):
        rule = f"must be sgd without momentum and weight_decay with strategy {name}"
        why = "which reads mean gradients off the clients' models"
        yield mistake(f"local.optimizer: {rule}, {why}, got {optimizer.name}")
    elif kind.weighs_steps and not plain:
        rule = f"must be sgd without weight_decay with strategy {name}, whose formula is for sgd"
        yield mistake(f"local.optimizer: {rule}, got {optimizer.name}")
