"""Rules of `local.gradient: {name: zeroth_order}`: what the coefficients of directions can carry.

An upload is one number for each step and direction. A setting that moves the model by anything but
these numbers is refused.
"""

from collections.abc import Iterator

from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections

_WHAT = "with local.gradient: zeroth_order"


def check_zeroth_order(sections: Sections) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that zeroth-order steps do not go with."""
    local = sections.local
    if local is None or local.zeroth_order is None:
        return
    yield from _check_local(local)
    federation, privacy = sections.federation, sections.privacy
    if federation is not None and federation.algorithm.name != "fedavg":
        yield (
            ("federation", "strategy"),
            f"{_WHAT} the directions of each round are others, so only means of one round's "
            f"coefficients have a meaning, got {federation.algorithm.name!r}; use fedavg",
        )
    if federation is not None and federation.server_averaging is not None:
        yield (
            ("federation", "server_averaging"),
            f"{_WHAT} the server keeps coefficients and no models; remove server_averaging",
        )
    if federation is not None and federation.participation.scheme == "buffered":
        yield (
            ("federation", "participation", "scheme"),
            f"{_WHAT} an upload has coefficients of its own round's directions, and buffered adds "
            "up uploads of several rounds; use another scheme",
        )
    if sections.task == "pate":
        yield ("local", "gradient"), "teachers and student are trained by gradients; use backward"
    if sections.personalization is not None:
        yield (
            ("personalization",),
            f"personal models are trained by gradients, and {_WHAT} a client has forward passes "
            "alone; remove personalization",
        )
    if privacy is None:
        return
    if privacy.mechanism.name != GRADIENT_PERTURBATION:
        yield (
            ("privacy", "mechanism"),
            f"{_WHAT} noise is added to slopes; use mechanism: {GRADIENT_PERTURBATION}",
        )
    if privacy.clipping.name == "per_layer" or privacy.clipping.groups:
        yield (
            ("privacy", "clipping"),
            f"{_WHAT} an example contributes one number for each direction, and directions have no "
            "layers; use clipping: flat",
        )
    if privacy.noise_correlation != "none":
        yield (
            ("privacy", "noise_correlation"),
            f"{_WHAT} the noise of one step is along other directions than that of the next, so it "
            "cannot cancel; use none",
        )


def _check_local(local: LocalSettings) -> Iterator[PathMessage]:
    optimizer = local.optimizer
    if not isinstance(optimizer, SgdSettings) or optimizer.momentum or optimizer.weight_decay:
        yield (
            ("local", "optimizer"),
            f"{_WHAT} it must be sgd without momentum and weight_decay: a step moves the model "
            "along its own directions alone",
        )
    if local.steps is None:
        yield (
            ("local", "epochs"),
            f"{_WHAT} all clients need the same number of steps, since they share the directions "
            "of a round; use steps",
        )
