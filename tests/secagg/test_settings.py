"""Settings refuse keys that the protocol does not read, and name the way out."""

from typing import Any

import pytest
from pydantic import ValidationError

from fedsim.secagg.settings import SecureAggregationSettings as Settings


def test_the_section_of_the_contract_is_enough() -> None:
    settings = Settings.model_validate({"protocol": "additive", "aggregators": 2})
    assert settings.ring_bits == 64
    assert settings.min_clients == 3


def test_every_key_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"protocol": "secagg", "aggregators": 3}, "use protocol: additive"),
        ({"protocol": "quantized", "helper_key_files": ["k"]}, "use protocol: additive"),
        ({"protocol": "additive", "threshold": 4}, "use protocol: secagg"),
        ({"protocol": "secagg_plus", "threshold": 4}, "secagg_plus computes it"),
        ({"protocol": "secagg", "corrupt_fraction": 0.2}, "use protocol: secagg_plus"),
        (
            {"protocol": "secagg_plus", "corrupt_fraction": 0.6, "dropout_fraction": 0.5},
            "lower one of them",
        ),
        ({"min_clients": 5, "max_clients": 4}, "raise max_clients or lower min_clients"),
        ({"aggregators": 3, "helper_key_fingerprints": ["ab" * 32]}, "a different one for each"),
        ({"aggregators": 3, "helper_key_files": ["a", "a"]}, "a different one for each"),
        ({"helper_key_fingerprints": ["AB" * 32]}, "should match pattern"),
        ({"max_weight": 0}, "use auto"),
        ({"frac_bits": -1}, "use auto"),
        ({"metrics": {"loss": 0.0}}, "greater than 0"),
        ({"metrics": {"loss": float("inf")}}, "finite number"),
        ({"min_clients": 1}, "greater than or equal to 2"),
        ({"aggregators": 1}, "greater than or equal to 2"),
    ],
)
def test_senseless_combinations_are_refused_with_the_fix(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        Settings(**keys)


def test_the_digest_changes_with_every_key_that_parties_must_share() -> None:
    plain = Settings().digest()
    assert Settings(value_bound=4.0).digest() != plain
    declared = {Settings(metrics={"loss": bound}).digest() for bound in (1.0, 2.0)}
    assert len({plain, *declared}) == 3
    assert Settings(combine_timeout_s=5.0).digest() == plain
