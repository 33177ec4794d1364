"""Whose settings are whose: single clients, members, shares and tables."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data import DataError
from fedsim.federation.client_plans import read_client_tables
from fedsim.federation.schedule import ClientPrivacy, resolve_client_privacy


def terms(
    clients: dict[str, Any], *, base: Path = Path(), seed: int = 0
) -> tuple[ClientPrivacy, ...]:
    privacy = PrivacySettings.model_validate(
        {"target_epsilon": 8.0, "delta": 1e-5, "max_grad_norm": 1.0, "clients": clients}
    )
    tables = read_client_tables(privacy, base)
    return resolve_client_privacy(privacy, num_clients=10, seed=seed, tables=tables)


def targets(found: tuple[ClientPrivacy, ...]) -> list[float | None]:
    return [one.privacy.target_epsilon for one in found]


def test_own_counts_before_the_groups_before_everybodys() -> None:
    found = terms(
        {
            "careful": {"members": [1, 2], "target_epsilon": 1.0, "max_grad_norm": 0.5},
            "2": {"target_epsilon": 3.0},
        }
    )
    assert targets(found)[:4] == [8.0, 1.0, 3.0, 8.0]
    assert [one.group for one in found[:4]] == [None, "careful", "careful", None]
    assert [one.privacy.max_grad_norm for one in found[:4]] == [1.0, 0.5, 0.5, 1.0]


def test_a_group_may_have_any_name() -> None:
    found = terms({"None": {"members": [1], "target_epsilon": 20.0}})
    assert targets(found)[:3] == [8.0, 20.0, 8.0]


def test_shares_are_exact_disjoint_and_by_the_seed() -> None:
    clients = {
        "careful": {"share": 0.3, "target_epsilon": 1.0},
        "bold": {"share": 0.4, "target_epsilon": 20.0},
        "0": {"target_epsilon": 2.0},
        "named": {"members": [1], "target_epsilon": 3.0},
    }
    found = terms(clients)
    assert [targets(found).count(value) for value in (1.0, 20.0, 8.0)] == [3, 4, 1]
    assert targets(found)[:2] == [2.0, 3.0]
    assert terms(clients) == found
    assert any(terms(clients, seed=seed) != found for seed in (1, 2, 3))


def test_a_table_gives_each_client_its_own_and_an_empty_cell_is_everybodys(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("client,eps,note\n4,0.5,x\n7,,y\n")
    found = terms(
        {"t": {"csv": "b.csv", "columns": {"target_epsilon": "eps"}, "delta": 1e-6}}, base=tmp_path
    )
    assert [targets(found)[client] for client in (4, 7, 0)] == [0.5, 8.0, 8.0]
    assert [found[client].privacy.delta for client in (4, 7, 0)] == [1e-6, 1e-6, 1e-5]
    assert [found[client].group for client in (4, 7, 0)] == ["t", "t", None]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (
            {"a": {"members": [1]}, "b": {"members": [2, 1]}},
            "client 1 is in the groups 'a' and 'b'",
        ),
        ({"a": {"members": [10]}}, "clients.a: there is no client 10; they are 0 to 9"),
        ({"a": {"share": 0.6}, "b": {"share": 0.5}}, "5 of 10 clients, but only 4 are in no other"),
        ({"11": {"delta": 0.1}}, "there is no client 11"),
    ],
)
def test_impossible_groups_are_refused(clients: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyPlanError, match=message):
        terms(clients)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,epsilon\n1,2\n", "b.csv:1: no column 'eps'; columns of the file: client"),
        ("id,eps\n1,2\n", "b.csv:1: no column 'client'"),
        ("client,eps\none,2\n", "b.csv:2: client must be a client number, got 'one'"),
        ("client,eps\n1,2\n1,3\n", "b.csv:3: client 1 has two lines; remove one"),
        ("client,eps\n1,two\n", "b.csv:2: eps must be a number, got 'two'"),
        ("client,eps\n1,-2\n", "b.csv:2: eps: must be greater than 0, got -2"),
        ("client,eps\n1,nan\n", "b.csv:2: eps: must be a finite number, got nan"),
        ("client,eps\n", "no client has a line; add one line for each client"),
        ("", "no column 'client'; columns of the file: none"),
    ],
)
def test_a_broken_table_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        terms({"t": {"csv": "b.csv", "columns": {"target_epsilon": "eps"}}}, base=tmp_path)
