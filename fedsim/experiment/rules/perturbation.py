"""Rules of `privacy.mechanism`: noise on trained models, or on examples, in place of gradients.

Each refusal is a condition of the proof in `fedsim.clients.mechanisms` that fails.
"""

from collections.abc import Iterator
from operator import attrgetter

from pydantic import ValidationError

from fedsim.algorithms.catalog import algorithms
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION, KINDS, ReleaseKind
from fedsim.clients.mechanisms.losses import LOSSES
from fedsim.clients.privacy_settings import BoundedExamplesSettings, PrivacySettings
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections
from fedsim.models.catalog import MODELS
from fedsim.models.settings import ModelSettings
from fedsim.server.settings import FederationSettings

# Keys of the section that act on gradients: the value that is allowed.
_GRADIENT_KEYS = {
    "sampling.name": "poisson",
    "sampling.rate": None,
    "noise_correlation": "none",
    "clipping.name": "flat",
}
_GRADIENT_KEYS_OF_CLIENTS = ("max_grad_norm", "sampling_rate")
_PROTECTED = {"example": "one example", "client": "everything of a client"}
_GRADIENT = f"or use mechanism: {GRADIENT_PERTURBATION}"


def check_perturbation(sections: Sections) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that noise off the gradients has no proof for."""
    privacy = sections.privacy
    if privacy is None or privacy.mechanism.name == GRADIENT_PERTURBATION:
        return
    yield from _check_view(privacy, KINDS[privacy.mechanism.name])
    if isinstance(privacy.mechanism, BoundedExamplesSettings):
        yield from _check_bounded(sections, privacy, privacy.mechanism)


def _check_bounded(
    sections: Sections, privacy: PrivacySettings, settings: BoundedExamplesSettings
) -> Iterator[PathMessage]:
    """Check what noise on models or examples of bounded norm needs."""
    if privacy.adjacency.name == "add_remove":
        why = _WHY_NO_ADD_REMOVE[settings.name]
        yield (
            ("privacy", "adjacency"),
            f"add_remove keeps client sizes private, and with mechanism: {settings.name} {why}; "
            "use zero_out or replace_one",
        )
    yield from _check_gradient_keys(privacy, settings.name)
    if sections.model is not None:
        yield from _check_loss(settings, sections.model)
    yield from _CHECKS[settings.name](sections, privacy)


def _check_output(sections: Sections, privacy: PrivacySettings) -> Iterator[PathMessage]:
    """Check that the training is the one whose sensitivity is proven."""
    if sections.local is not None:
        yield from _check_descent(sections.local)
    if sections.federation is not None:
        yield from _check_steps(sections.federation)
    if sections.model is not None and sections.model.name in MODELS:
        yield from _check_linear(sections.model)


def _check_input(sections: Sections, privacy: PrivacySettings) -> Iterator[PathMessage]:
    """Check that the noisy examples can be made again."""
    if privacy.noise == "secure":
        yield (
            ("privacy", "noise"),
            "with mechanism: input_perturbation a process makes the noisy examples again from the "
            f"seed, and secure noise would be another release; use noise: seeded, {_GRADIENT}",
        )


_CHECKS = {"output_perturbation": _check_output, "input_perturbation": _check_input}
_WHY_NO_ADD_REMOVE = {
    "output_perturbation": "the mean loss is divided by the number of examples",
    "input_perturbation": "there is one noisy row for each example",
}


def _check_view(privacy: PrivacySettings, kind: ReleaseKind) -> Iterator[PathMessage]:
    """Check that each client releases what it charges, for the unit of its kind.

    Args:
        privacy: the section.
        kind: that `privacy.mechanism` names.
    """
    chosen = f"mechanism: {kind.mechanism}"
    if kind.local_trust_only and privacy.trust.name != "local":
        yield (
            ("privacy", "trust"),
            f"with {chosen} each client adds all of its noise alone, and {privacy.trust.name} "
            f"trust needs noise on sums; use trust: local, {_GRADIENT}",
        )
    if privacy.release_kind is not kind:
        yield (
            ("privacy", "unit"),
            f"{chosen} has a sensitivity for {_PROTECTED[kind.unit]}, and none for "
            f"{_PROTECTED[privacy.unit]}; use unit: {kind.unit}, {_GRADIENT}",
        )


def _check_gradient_keys(privacy: PrivacySettings, name: str) -> Iterator[PathMessage]:
    why = f"acts on gradients, and mechanism: {name} adds no noise to them"
    for key, allowed in _GRADIENT_KEYS.items():
        if attrgetter(key)(privacy) != allowed:
            written = key.removesuffix(".name")
            yield ("privacy", *written.split(".")), f"{why}; remove {written}, {_GRADIENT}"
    for client, entry in privacy.clients.items():
        for key in _GRADIENT_KEYS_OF_CLIENTS:
            if getattr(entry, key) is not None or key in entry.columns:
                yield ("privacy", "clients", client), f"{key} {why}; remove {key}"


def _check_loss(settings: BoundedExamplesSettings, model: ModelSettings) -> Iterator[PathMessage]:
    """Check that a target has a public bound."""
    if model.loss not in LOSSES:
        yield (
            ("model", "loss"),
            f"mechanism: {settings.name} needs the bounds of a loss and its targets, "
            f"which are known of {', '.join(LOSSES)}; use one of them, {_GRADIENT}",
        )
    elif model.loss == "mse" and settings.max_target_norm is None:
        yield (
            ("privacy", "mechanism"),
            f"{settings.name} with loss mse needs max_target_norm, the L2 bound of the target of "
            "an example",
        )
    elif model.loss != "mse" and settings.max_target_norm is not None:
        yield (
            ("privacy", "mechanism", "max_target_norm"),
            f"the targets of loss {model.loss} have a bound already; remove max_target_norm",
        )


def _check_descent(local: LocalSettings) -> Iterator[PathMessage]:
    """Check that local training is the descent whose sensitivity is proven."""
    optimizer = local.optimizer
    proven = "mechanism: output_perturbation has a proof for plain gradient descent alone"
    if not isinstance(optimizer, SgdSettings) or optimizer.momentum:
        yield (
            ("local", "optimizer"),
            f"{proven}; use sgd without momentum, {_GRADIENT}",
        )
    if not optimizer.weight_decay:
        yield (
            ("local", "optimizer"),
            "mechanism: output_perturbation needs a strongly convex problem, which weight_decay "
            f"above 0 makes; set weight_decay: 0.01, for example, {_GRADIENT}",
        )
    if local.views is not None:
        yield ("local", "augment"), f"{proven}, on the examples as they are; remove the views"
    if local.max_physical_batch is not None:
        yield (
            ("local", "max_physical_batch"),
            "mechanism: output_perturbation computes each batch at once; remove "
            "max_physical_batch, or set a smaller batch_size",
        )
    if local.lr_schedule is not None:
        yield (
            ("local", "lr_schedule"),
            "the sensitivity of output_perturbation is proven for one learning rate; remove "
            "lr_schedule",
        )


def _check_steps(federation: FederationSettings) -> Iterator[PathMessage]:
    """Check that the algorithm leaves local steps as they are."""
    kind = algorithms().get(federation.algorithm.name)
    try:
        changes = kind is not None and kind(federation.algorithm.options).client() is not None
    except ValidationError:  # `check_algorithm` reports it
        return
    if changes:
        yield (
            ("federation", "strategy"),
            "mechanism: output_perturbation has a proof for plain gradient descent alone, and "
            f"strategy {federation.algorithm.name} changes local steps; use fedavg, {_GRADIENT}",
        )


def _check_linear(model: ModelSettings) -> Iterator[PathMessage]:
    if model.name != "logistic":
        yield (
            ("model", "name"),
            "mechanism: output_perturbation has a proven sensitivity for a linear model alone: "
            f"with hidden layers, as of {model.name}, the loss is not convex; use logistic, "
            f"{_GRADIENT}",
        )
