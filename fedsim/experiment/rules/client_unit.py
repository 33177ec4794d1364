"""Rules of the unit `client`: keys that belong to examples, and what would reveal a client's size.

Each refusal is a condition of docs/client_unit.md that fails.
"""

from collections.abc import Iterator
from operator import attrgetter

from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment.messages import PathMessage
from fedsim.server.settings import FederationSettings

_WHY = "with unit: client nothing is released of single examples"
# Keys of the section that act on examples: the values that are allowed, and the fix.
_EXAMPLE_KEYS: dict[str, tuple[tuple[object, ...], str]] = {
    "sampling.name": (
        ("poisson",),
        "remove sampling: local training draws batches as without privacy",
    ),
    "sampling.rate": ((None,), "remove the rate; local.batch_size sets the batches"),
    "noise_correlation": (("none",), "remove noise_correlation"),
    "clipping.groups": (({},), "remove groups: one bound is for the whole update"),
    "clipping.name": (("flat", "adaptive"), "use clipping: flat or adaptive, of the whole update"),
}
_EXAMPLE_KEYS_OF_CLIENTS = ("max_grad_norm", "sampling_rate")


def check_client_unit(
    privacy: PrivacySettings,
    federation: FederationSettings | None,
    local: LocalSettings | None,
    *,
    votes: bool = False,
) -> Iterator[PathMessage]:
    """Yield (path, message) for every setting that whole updates have no theorem for.

    Args:
        privacy: the `privacy` section, with unit client.
        federation: the `federation` section; None if it has mistakes.
        local: the `local` section; None if it has mistakes.
        votes: whether clients send votes, whose size is fixed, in place of updates.
    """
    if privacy.max_update_norm is None and not votes:
        yield (
            ("privacy",),
            "unit: client needs max_update_norm, the L2 bound of what one client contributes",
        )
    if local is not None and local.epochs is not None:
        yield (
            ("local", "epochs"),
            "makes a client's steps follow from its size, which is part of what unit: client "
            "protects; use local.steps",
        )
    for key, (allowed, fix) in _EXAMPLE_KEYS.items():
        if attrgetter(key)(privacy) not in allowed:
            yield ("privacy", *key.removesuffix(".name").split(".")), f"{_WHY}; {fix}"
    for name, entry in privacy.clients.items():
        for key in _EXAMPLE_KEYS_OF_CLIENTS:
            if getattr(entry, key) is not None or key in entry.columns:
                yield (
                    ("privacy", "clients", name),
                    f"{key} acts on examples, and {_WHY}; remove it: all clients have one "
                    "max_update_norm",
                )
    if privacy.clipping.name == "adaptive" and privacy.trust.fallback_epsilon is not None:
        yield (
            ("privacy", "trust", "fallback_epsilon"),
            "has no share of the noise planned for the bit that adaptive clipping learns from; use "
            "clipping: flat, or remove fallback_epsilon",
        )
    if federation is not None:
        yield from _check_weights(privacy, federation)


def _check_weights(
    privacy: PrivacySettings, federation: FederationSettings
) -> Iterator[PathMessage]:
    """Check that no weight depends on what a client has."""
    weights = federation.weights
    if weights.uses_sizes:
        other = ", size_power: 0" if weights.name == "noise" else ""
        yield (
            ("federation", "weighting"),
            f"'{weights.name}' would reveal client sizes, which are part of what unit: client "
            f"protects; use weighting: uniform{other}",
        )
    elif privacy.clipping.name == "adaptive" and not weights.is_uniform:
        yield (
            ("federation", "weighting"),
            "adaptive clipping counts every client once; use weighting: uniform, or clipping: flat",
        )
