"""Keys of a protocol are of its own class; numbers that cannot work are refused with the fix."""

from typing import Any

import pytest
from pydantic import ValidationError

from fedsim.secagg.settings import SecureAggregationSettings


def settings(**keys: Any) -> SecureAggregationSettings:
    return SecureAggregationSettings.model_validate(keys)


def test_the_section_of_the_contract_is_enough() -> None:
    given = settings(protocol="additive", aggregators=2)
    assert given == settings()
    assert given.helpers == 1
    assert given.encoding.ring_bits == 64
    assert given.min_clients == 3


@pytest.mark.parametrize("protocol", ["additive", "quantized", "secagg", "secagg_plus"])
def test_what_is_written_out_is_read_back(protocol: str) -> None:
    given = settings(protocol=protocol)
    assert settings(**given.model_dump()) == given
    assert given.helpers == (protocol == "additive")


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"protocol": "secagg", "aggregators": 3}, "remove aggregators, or use protocol: additive"),
        (
            {"protocol": "quantized", "keys": {"helper_files": ["k"]}},
            "remove keys, or use protocol: additive",
        ),
        ({"protocol": {"name": "additive", "threshold": 4}}, "additive.threshold\n  Extra inputs"),
        ({"protocol": {"name": "secagg_plus", "threshold": 4}}, "plus.threshold\n  Extra inputs"),
        (
            {
                "protocol": {
                    "name": "secagg_plus",
                    "corrupt_fraction": 0.6,
                    "dropout_fraction": 0.5,
                }
            },
            "lower one of them",
        ),
        (
            {"min_clients": 5, "encoding": {"max_clients": 4}},
            "raise encoding.max_clients or lower min_clients",
        ),
        ({"aggregators": 3, "keys": {"helper_fingerprints": ["ab" * 32]}}, "name one for each"),
        ({"aggregators": 3, "keys": {"helper_files": ["a", "a"]}}, "name a different one for each"),
        ({"keys": {"client_files": ["a", "a"]}}, "name a different one for each"),
        ({"keys": {"helper_fingerprints": ["AB" * 32]}}, "should match pattern"),
        ({"encoding": {"max_weight": 0}}, "greater than or equal to 1"),
        ({"encoding": {"frac_bits": -1}}, "greater than or equal to 0"),
        ({"metrics": {"loss": 0.0}}, "greater than 0"),
        ({"metrics": {"loss": float("inf")}}, "finite number"),
        ({"min_clients": 1}, "greater than or equal to 2"),
        ({"aggregators": 1}, "greater than or equal to 2"),
    ],
)
def test_senseless_combinations_are_refused_with_the_fix(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValidationError, match=fix):
        settings(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"protocol": "quantized"},
        {"protocol": {"name": "secagg"}},
        {"protocol": {"name": "secagg", "threshold": 9}},
        {"protocol": {"name": "secagg_plus", "security_bits": 41}},
        {"aggregators": 3},
        {"min_clients": 4},
        {"encoding": {"value_bound": 4.0}},
        {"encoding": {"payload": "parameters"}},
        {"prg": "chacha20"},
        {"metrics": {"loss": 1.0}},
        {"metrics": {"loss": 2.0}},
        {"keys": {"client_fingerprints": ["ab" * 32]}},
    ],
)
def test_the_digest_changes_with_every_key_that_parties_must_share(keys: dict[str, Any]) -> None:
    assert settings(**keys).digest() != settings().digest()


@pytest.mark.parametrize(
    "keys",
    [
        {"on_abort": "skip_round"},
        {"protocol": {"name": "additive", "combine_timeout_s": 5.0, "combine_retries": 0}},
        {"keys": {"helper_files": ["a"], "client_files": ["b"]}},
        {"keys": {"helper_fingerprints": ["ab" * 32]}},
    ],
)
def test_the_digest_stays_with_what_each_party_has_of_its_own(keys: dict[str, Any]) -> None:
    assert settings(**keys).digest() == settings().digest()


def test_the_plan_has_the_pins_of_helpers_and_no_file() -> None:
    keys = {"helper_fingerprints": ["ab" * 32], "helper_files": ["a"]}
    assert settings(keys=keys).plan()["keys"] == {
        "helper_fingerprints": ["ab" * 32],
        "client_fingerprints": [],
    }
