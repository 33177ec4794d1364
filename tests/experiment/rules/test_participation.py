"""Poisson draws are allowed where the theorem has them, and refused by name elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.experiment.public_tables import read_public_tables
from fedsim.experiment.rules import Sections
from fedsim.experiment.rules.clients import check_poisson_draws
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
    sections = Sections(Path(), privacy=own, secure_aggregation=secure)
    messages = list(check_poisson_draws(settings, sections))
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


def mistakes(participation: dict[str, Any], tmp_path: Path, **sections: Any) -> list[str]:
    """Return the mistakes of a whole file, each as `key: message`."""
    content: dict[str, Any] = {
        "name": "p",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 8}},
        "model": {"name": "logistic"},
        "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": None,
        **sections,
    }
    federation = {"rounds": 6, "participation": participation, **sections.get("federation", {})}
    try:
        load_experiment({**content, "federation": federation}, base=tmp_path)
    except ExperimentError as error:
        return [str(problem) for problem in error.problems]
    return []


LOCAL = {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 1.0}
BUFFERED = {"scheme": "buffered", "concurrency": 4, "buffer_size": 2}
TRACE = {"scheme": "trace", "availability": "0-2: 1-4\n3: 6"}


@pytest.mark.parametrize(
    ("participation", "sections", "expected"),
    [
        ({"scheme": "cyclic"}, {}, "needs groups or members"),
        ({"scheme": "cyclic", "groups": 9}, {}, "at most 8"),
        ({"scheme": "cyclic", "members": ["0-3", "4-8"]}, {}, "name client 8"),
        ({"scheme": "cyclic", "members": ["0-3", "4-6"]}, {}, "client 7 is in no group"),
        ({"scheme": "cyclic", "members": ["0-4", "4-7"]}, {}, "client 4 is in two groups"),
        ({"scheme": "cyclic", "groups": 2, "concurrency": 2}, {}, "belongs to 'buffered'"),
        ({"scheme": "trace"}, {}, "needs path or availability"),
        ({"scheme": "trace", "availability": "8: 1"}, {}, "names client 8"),
        ({"scheme": "trace", "availability": "7: 7"}, {}, "none of the 6 rounds"),
        ({"scheme": "trace", "availability": "7; 7"}, {}, "line 1: must be `clients: rounds`"),
        ({"scheme": "trace", "path": "no.csv"}, {}, "no such file"),
        (
            TRACE,
            {"privacy": None, "secure_aggregation": {"min_clients": 2}},
            "raise federation.participation.min_available",
        ),
        ({**BUFFERED, "concurrency": 9}, {}, "at most 8"),
        ({**BUFFERED, "buffer_size": 9}, {}, "at most 8"),
        ({**BUFFERED, "durations": {"values": [1.0]}}, {}, "has 1 durations for 8 clients"),
        (BUFFERED, {"federation": {"clients_per_round": 3}}, "remove clients_per_round"),
        (BUFFERED, {"secure_aggregation": {"min_clients": 2}}, "remove secure_aggregation"),
        (BUFFERED, {"privacy": {**LOCAL, "trust": "central"}}, "use trust: local"),
        (
            BUFFERED,
            {
                "privacy": {
                    "target_epsilon": 4.0,
                    "delta": 1e-3,
                    "unit": "client",
                    "max_update_norm": 1.0,
                    "clipping": "adaptive",
                }
            },
            "use clipping: flat",
        ),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused_by_name(
    participation: dict[str, Any], sections: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = mistakes(participation, tmp_path, **sections)
    assert any(expected in each for each in found), found


@pytest.mark.parametrize(
    "participation",
    [
        {"scheme": "cyclic", "groups": 3},
        {**TRACE, "min_available": 3},
        BUFFERED,
        {**BUFFERED, "durations": {"values": [1.0] * 8}},
    ],
)
def test_schemes_that_fit_are_accepted(participation: dict[str, Any], tmp_path: Path) -> None:
    assert mistakes(participation, tmp_path, privacy=LOCAL) == []


def test_tables_become_part_of_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("client,first,last\n1,1,3\n0,1,2\n0,2,3\n3,5,5\n")
    (tmp_path / "r.csv").write_text("client,round\n0,2\n0,1\n2,4\n")
    (tmp_path / "d.csv").write_text("client,name,seconds\n1,b,2.5\n0,a,1\n")
    base = Path(tmp_path)

    def read(settings: dict[str, Any]) -> Any:
        federation = FederationSettings.model_validate({"rounds": 6, "participation": settings})
        read, wrong = read_public_tables(federation, base)
        assert not wrong
        assert read is not None
        return read.participation

    assert read({"scheme": "trace", "path": "t.csv"}).availability == "0-1: 1-3\n3: 5\n"
    assert read({"scheme": "trace", "path": "r.csv"}).availability == "0: 1-2\n2: 4\n"
    table = {"path": "d.csv", "column": "seconds"}
    assert read({**BUFFERED, "durations": table}).durations.values == [1.0, 2.5]
    again = read({**BUFFERED, "durations": table})
    assert FederationSettings(rounds=6, participation=again).participation == again


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("client,first\n0,1\n", "must have the columns client, round or client, first, last"),
        ("client,round\n", "no client has a line"),
        ("client,round\nx,1\n", "line 2 of t.csv: client must be a whole number"),
        ("client,round\n" + "1" * 5000 + ",1\n", "line 2 of t.csv: client must be a whole number"),
        ("client,round\n0,0\n", "round must be a whole number from 1"),
        ("client,first,last\n0,3,2\n", "last must be a whole number from 3"),
        ("client,round\n0\n", "round must be a whole number"),
    ],
)
def test_a_table_with_a_mistake_is_refused_with_its_line(
    text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(text)
    found = mistakes({"scheme": "trace", "path": "t.csv"}, tmp_path)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("federation", "sections", "expected"),
    [
        ({"partial_work": {"share": 1.0, "on_partial": "drop"}}, {}, "leaves out every client"),
        ({"partial_work": {"share": 0.5}}, {}, "a round of one step has no part"),
        (
            {"partial_work": {"share": 0.5}, "participation": {"scheme": "poisson"}},
            {"privacy": CENTRAL_CLIENT},
            "private Poisson draws are secret",
        ),
        (
            {"partial_work": {"share": 0.5}},
            {"privacy": {**LOCAL, "noise": "secure", "sampling": "balls_and_bins"}},
            "rounds of equal length",
        ),
        (
            {"partial_work": {"share": 0.9, "on_partial": "drop"}},
            {"secure_aggregation": {"min_clients": 3}},
            "must be at most 1, the clients of a round",
        ),
        ({"partial_work": {"share": 0.0}}, {}, "must be > 0"),
    ],
)
def test_partial_work_that_is_not_defined_is_refused(
    federation: dict[str, Any], sections: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    scheme = {"scheme": "uniform"}
    found = mistakes(scheme, tmp_path, **sections, federation=federation)
    assert any(expected in each for each in found), found
