"""Rules of `privacy.perturbation`: noise on trained models, or on examples, in place of gradients.

Each refusal is a condition of the proof in `fedsim.clients.perturbation` that fails.
"""

from collections.abc import Iterator
from operator import attrgetter

from pydantic import ValidationError

from fedsim.algorithms.catalog import algorithms
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.perturbation.losses import LOSSES
from fedsim.clients.privacy_settings import PrivacySettings
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
_GRADIENT = "or use perturbation: gradient"


def check_perturbation(sections: Sections) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that noise off the gradients has no proof for."""
    privacy = sections.privacy
    if privacy is None or privacy.perturbation == "gradient":
        return
    yield from _check_view(privacy)
    yield from _check_gradient_keys(privacy)
    if sections.model is not None:
        yield from _check_loss(privacy, sections.model)
    if privacy.perturbation == "output":
        if sections.local is not None:
            yield from _check_descent(sections.local)
        if sections.federation is not None:
            yield from _check_steps(sections.federation)
        if sections.model is not None and sections.model.name in MODELS:
            yield from _check_linear(sections.model)
    elif privacy.noise == "secure":
        yield (
            ("privacy", "noise"),
            "with perturbation: input a process makes the noisy examples again from the seed, and "
            f"secure noise would be another release; use noise: seeded, {_GRADIENT}",
        )


def _check_view(privacy: PrivacySettings) -> Iterator[PathMessage]:
    """Check that each client releases what it charges, for one of its examples."""
    chosen = f"perturbation: {privacy.perturbation}"
    if privacy.trust.name != "local":
        yield (
            ("privacy", "trust"),
            f"with {chosen} each client adds all of its noise alone, and {privacy.trust.name} "
            f"trust needs noise on sums; use trust: local, {_GRADIENT}",
        )
    if privacy.unit == "client":
        yield (
            ("privacy", "unit"),
            f"{chosen} has a sensitivity for one example, and none for everything of a client; use "
            f"unit: example, {_GRADIENT}",
        )
    if privacy.adjacency.name == "add_remove":
        why = {
            "output": "the mean loss is divided by the number of examples",
            "input": "there is one noisy row for each example",
        }[privacy.perturbation]
        yield (
            ("privacy", "adjacency"),
            f"add_remove keeps client sizes private, and with {chosen} {why}; use zero_out or "
            "replace_one",
        )


def _check_gradient_keys(privacy: PrivacySettings) -> Iterator[PathMessage]:
    why = f"acts on gradients, and perturbation: {privacy.perturbation} adds no noise to them"
    for key, allowed in _GRADIENT_KEYS.items():
        if attrgetter(key)(privacy) != allowed:
            written = key.removesuffix(".name")
            yield ("privacy", *written.split(".")), f"{why}; remove {written}, {_GRADIENT}"
    for name, entry in privacy.clients.items():
        for key in _GRADIENT_KEYS_OF_CLIENTS:
            if getattr(entry, key) is not None or key in entry.columns:
                yield ("privacy", "clients", name), f"{key} {why}; remove {key}"


def _check_loss(privacy: PrivacySettings, model: ModelSettings) -> Iterator[PathMessage]:
    """Check that a target has a public bound."""
    if model.loss not in LOSSES:
        yield (
            ("model", "loss"),
            f"perturbation: {privacy.perturbation} needs the bounds of a loss and its targets, "
            f"which are known of {', '.join(LOSSES)}; use one of them, {_GRADIENT}",
        )
    elif model.loss == "mse" and privacy.max_target_norm is None:
        yield (
            ("privacy",),
            f"perturbation: {privacy.perturbation} with loss mse needs max_target_norm, the L2 "
            "bound of the target of an example",
        )
    elif model.loss != "mse" and privacy.max_target_norm is not None:
        yield (
            ("privacy", "max_target_norm"),
            f"the targets of loss {model.loss} have a bound already; remove max_target_norm",
        )


def _check_descent(local: LocalSettings) -> Iterator[PathMessage]:
    """Check that local training is the descent whose sensitivity is proven."""
    optimizer = local.optimizer
    proven = "perturbation: output has a proof for plain gradient descent alone"
    if not isinstance(optimizer, SgdSettings) or optimizer.momentum:
        yield (
            ("local", "optimizer"),
            f"{proven}; use sgd without momentum, {_GRADIENT}",
        )
    if not optimizer.weight_decay:
        yield (
            ("local", "optimizer"),
            "perturbation: output needs a strongly convex problem, which weight_decay above 0 "
            f"makes; set weight_decay: 0.01, for example, {_GRADIENT}",
        )
    if local.views is not None:
        yield ("local", "augment"), f"{proven}, on the examples as they are; remove the views"
    if local.max_physical_batch is not None:
        yield (
            ("local", "max_physical_batch"),
            "perturbation: output computes each batch at once; remove max_physical_batch, or set a "
            "smaller batch_size",
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
            "perturbation: output has a proof for plain gradient descent alone, and strategy "
            f"{federation.algorithm.name} changes local steps; use fedavg, {_GRADIENT}",
        )


def _check_linear(model: ModelSettings) -> Iterator[PathMessage]:
    if model.name != "logistic":
        yield (
            ("model", "name"),
            f"perturbation: output has a proven sensitivity for a linear model alone: with hidden "
            f"layers, as of {model.name}, the loss is not convex; use logistic, {_GRADIENT}",
        )
