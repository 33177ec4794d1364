"""Two certificates of one run: each is printed with its observer, and never one for the other."""

import contextlib
import io
import json
import math
import re
from typing import Any

import pytest
from rich.console import Console

from fedsim.accountant import PrivacyLedger
from fedsim.report.contents import read_contents
from fedsim.report.html import recipe, render_report
from fedsim.report.terminal import print_result
from fedsim.runs.directory import RunDirectory
from fedsim.statement import read_facts, to_json

MIN_CLIENTS, COLLUDING, DELTA = 5, 1, 1e-3
SECURE = {
    "protocol": "additive",
    "clipped": 0,
    "parties": {"survivors_per_round": [MIN_CLIENTS] * 40},
    "trust": {"privacy_requires": "one of leader and helpers follows the protocol"},
}


def share(row: dict[str, Any]) -> None:
    """Give a row of local trust the shares of which four make its noise."""
    own = json.loads(json.dumps(row["ledger"]))
    for entry in own:
        entry["event"]["event"]["noise_multiplier"] /= math.sqrt(MIN_CLIENTS - COLLUDING)
    row["ledger_against_server"] = own
    epsilon = PrivacyLedger.from_list(own).epsilon_with_slack(DELTA)
    row |= {"epsilon_against_server": epsilon, "against": "sums"}


def shared(directory: RunDirectory, *, trust: str = "distributed", **changes: Any) -> RunDirectory:
    """Make a run of local trust one of another trust model."""
    content = directory.read_json("privacy.json")
    sums: dict[str, Any] = {"local_steps": 1, "optimizer": "sgd"}
    if trust == "distributed":
        sums |= {"min_clients": MIN_CLIENTS, "colluding_clients": COLLUDING}
        for row in content["clients"]:
            share(row)
        content["secure_aggregation"] = SECURE
    content |= {"trust": trust, "sums": sums, **changes}
    content |= to_json(read_facts({k: v for k, v in content.items() if k != "attack"}))
    directory.write_json("privacy.json", content)
    return directory


def printed(directory: RunDirectory) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_result(directory, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def page_of(directory: RunDirectory) -> str:
    return re.sub(r"<[^>]+>", " ", render_report(read_contents(directory)))


@pytest.mark.slow
def test_terminal_and_page_name_both_observers(make_run) -> None:
    directory = shared(make_run(clients=5, rounds=5))
    first, second = directory.read_json("privacy.json")["certificates"]
    assert (first["against"], second["against"]) == ("sums", "server")
    assert second["epsilon"] > first["epsilon"]
    text = " ".join(printed(directory).split())
    for one, observer in (
        (first, "an observer of sums"),
        (second, "a server that sees every update"),
    ):
        assert re.search(rf"within ε = [\d.]+ at δ = 0.001 against {observer}", text)
        assert f"{one['epsilon']:.3f}"[:4] in text
    assert "ε (sums)" in text
    assert "ε (server)" in text
    page = page_of(directory)
    assert "Guarantee against an observer of sums" in page
    assert "Guarantee against a server that sees every update" in page
    assert "Largest ε of any client, against an observer of sums" in page
    assert "An attacker sees every sum of updates" in page


def test_a_view_without_its_conditions_is_printed_nowhere(make_run) -> None:
    directory = shared(make_run(clients=5, rounds=5), secure_aggregation=None)
    text = " ".join(printed(directory).split())
    assert "no guarantee: its updates were not summed by a protocol" in text
    assert "against an observer of sums;" not in text.split("no guarantee:")[1]
    page = page_of(directory)
    assert "the reported ε is not supported" in page
    assert "Guarantee against an observer of sums" not in page
    assert "Guarantee against a server that sees every update" in page
    assert "reported ε (sums)" in page


@pytest.mark.slow
def test_central_trust_names_global_models_and_no_server(make_run) -> None:
    directory = shared(make_run(clients=3, rounds=5), trust="central")
    text = printed(directory)
    assert "against an observer of global models" in " ".join(text.split())
    assert "ε (server)" not in text
    page = page_of(directory)
    assert "Guarantee against an observer of global models" in page
    assert "The server is trusted" in page


@pytest.mark.slow
def test_the_printed_script_recomputes_both(make_run) -> None:
    pytest.importorskip("dp_accounting")
    directory = shared(make_run(clients=1, rounds=5))
    (row,) = directory.read_json("privacy.json")["clients"]
    found = recipe(read_contents(directory))
    assert found is not None
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(found["script"], {})
    both = [float(line) for line in output.getvalue().split()]
    assert both == pytest.approx([row["epsilon"], row["epsilon_against_server"]], rel=2e-3)


@pytest.mark.slow
def test_sizes_that_are_private_have_no_column(make_run) -> None:
    directory = make_run(clients=3, rounds=5)
    content = directory.read_json("privacy.json")
    for row in content["clients"]:
        row["examples"] = None
        row["ledger"] = [
            {"event": entry["event"]["event"], "count": entry["count"]} for entry in row["ledger"]
        ]
    directory.write_json("privacy.json", content)
    shared(directory, trust="local", unit="client", sampling=None, weighting="uniform")
    text, page = printed(directory), page_of(directory)
    assert "examples" not in text
    assert "for everything of one client" in " ".join(text.split())
    assert "each protected as a whole" in page
    assert "for everything that client k has" in page.replace("ε k", "ε_k")
