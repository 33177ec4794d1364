"""Rules of trust models and units: which combinations have a theorem, and what to change."""

from collections.abc import Iterator

from fedsim.clients.settings import LocalSettings, PrivacySettings
from fedsim.experiment.messages import PathMessage
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import FederationSettings

BUILT = frozenset({("local", "example")})  # (trust, unit)


def check_trust(
    privacy: PrivacySettings,
    local: LocalSettings | None,
    federation: FederationSettings | None,
    secure: SecureAggregationSettings | None,
) -> Iterator[PathMessage]:
    """Yield (path, message) for every condition of the trust model and the unit that fails.

    Args:
        privacy: the `privacy` section.
        local: the `local` section; None if it has mistakes.
        federation: the `federation` section; None if it has mistakes.
        secure: the `secure_aggregation` section; None if there is none.
    """
    if (privacy.trust, privacy.unit) not in BUILT:
        yield ("privacy", "trust"), f"{privacy.trust} with unit {privacy.unit} is not built yet"
