"""Poisson draws are allowed where the theorem has them, and refused by name elsewhere."""

from typing import Any

import pytest

from fedsim.clients.settings import PrivacySettings
from fedsim.experiment.rules.participation import check_poisson_draws
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import FederationSettings

CENTRAL_CLIENT = {
    "trust": "central",
    "unit": "client",
    "max_update_norm": 1.0,
    "target_epsilon": 1.0,
    "delta": 1e-3,
}
CENTRAL_EXAMPLE = {
    "trust": "central",
    "max_grad_norm": 1.0,
    "target_epsilon": 1.0,
    "delta": 1e-3,
}


def refused(
    federation: dict[str, Any] | None = None,
    privacy: dict[str, Any] | None = None,
    secure: SecureAggregationSettings | None = None,
    scheme: str = "poisson",
) -> list[str]:
    content = {"rounds": 2, "participation": {"scheme": scheme}, **(federation or {})}
    settings = FederationSettings.model_validate(content)
    own = None if privacy is None else PrivacySettings.model_validate(privacy)
    messages = list(check_poisson_draws(settings, own, secure))
    assert all("use " in text or "remove " in text for _, text in messages)
    return [".".join(map(str, path)) for path, _ in messages]


def test_the_cell_of_the_theorem_and_a_federation_without_privacy_may_draw() -> None:
    assert refused(privacy=CENTRAL_CLIENT) == []
    assert refused() == []
    assert refused({"deadline": 1.0, "min_participants": 5}) == []  # the schedule is public


SECURE = SecureAggregationSettings()
SCHEME = "federation.participation.scheme"


@pytest.mark.parametrize(
    ("federation", "privacy", "secure", "where"),
    [
        ({}, CENTRAL_EXAMPLE, None, SCHEME),
        ({}, {**CENTRAL_CLIENT, "trust": "local"}, None, SCHEME),
        ({}, {**CENTRAL_CLIENT, "trust": "distributed"}, None, SCHEME),
        ({}, CENTRAL_CLIENT, SECURE, SCHEME),
        ({}, None, SECURE, SCHEME),
        ({"deadline": 1.0}, CENTRAL_CLIENT, None, "federation.deadline"),
        ({"min_participants": 2}, CENTRAL_CLIENT, None, "federation.min_participants"),
        ({}, {**CENTRAL_CLIENT, "on_exhausted": "withdraw"}, None, "privacy.on_exhausted"),
        ({}, {**CENTRAL_CLIENT, "on_exhausted": "stop"}, None, "privacy.on_exhausted"),
    ],
)
def test_what_would_show_who_was_drawn_is_refused(
    federation: dict[str, Any],
    privacy: dict[str, Any] | None,
    secure: SecureAggregationSettings | None,
    where: str,
) -> None:
    assert refused(federation, privacy, secure) == [where]
    assert refused(federation, privacy, secure, scheme="uniform") == []
