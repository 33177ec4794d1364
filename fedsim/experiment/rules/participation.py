"""Rules of `federation.participation`: where clients may be drawn one by one."""

from collections.abc import Iterator

from fedsim.clients.settings import PrivacySettings
from fedsim.experiment.messages import PathMessage
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import FederationSettings


def check_poisson_draws(
    federation: FederationSettings,
    privacy: PrivacySettings | None,
    secure: SecureAggregationSettings | None,
) -> Iterator[PathMessage]:
    """Yield (path, message) for every condition of Poisson draws that fails.

    Args:
        federation: the `federation` section.
        privacy: the `privacy` section; None if there is none.
        secure: the `secure_aggregation` section; None if there is none.
    """
    if federation.participation.scheme != "poisson":
        return
    scheme = ("federation", "participation", "scheme")
    if secure is not None:
        yield (
            scheme,
            "the parties of secure_aggregation see who takes part in a sum, and a draw may take "
            "fewer than min_clients; remove secure_aggregation, or use scheme: uniform",
        )
    if privacy is None:
        return
    if (privacy.trust, privacy.unit) != ("central", "client"):
        yield (
            scheme,
            f"a secret draw of clients protects a client from whoever sees the models, and here "
            f"trust is {privacy.trust} and unit {privacy.unit}; use trust: central with unit: "
            "client, or scheme: uniform",
        )
    if federation.deadline is not None:
        yield (
            ("federation", "deadline"),
            "a reply that is late shows that its client was drawn, and the draw is secret; remove "
            "deadline, or use participation: {scheme: uniform}",
        )
    if federation.min_participants > 1:
        yield (
            ("federation", "min_participants"),
            "a run that ends when few updates came shows how many clients were drawn, and the draw "
            "is secret; remove min_participants, or use participation: {scheme: uniform}",
        )
    if privacy.on_exhausted != "refuse":
        yield (
            ("privacy", "on_exhausted"),
            f"{privacy.on_exhausted} needs clients that charge themselves, and a secret draw "
            "charges all of them for every round; use on_exhausted: refuse, or participation: "
            "{scheme: uniform}",
        )
