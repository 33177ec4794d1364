"""A charged search: the file that describes it, its plan, and real runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fedsim
from fedsim.accountant import PldAccountant
from fedsim.accountant.sampler_slack import MAX_DRAWS, epsilon_with_slack
from fedsim.cli import cli
from fedsim.comparison.load import load_comparison
from fedsim.core.errors import FedsimError
from fedsim.experiment import ExperimentError
from fedsim.runs.directory import RunDirectoryError
from fedsim.tools.search.ledger import SearchLedger
from fedsim.tools.search.plan import SearchError, plan_search
from fedsim.tools.search.verify import verify_search

BASE = """\
name: tiny
data:
  dataset: digits
  partition: {scheme: iid, num_clients: 3}
model: {name: logistic}
federation: {rounds: 2}
local:
  steps: 1
  batch_size: 32
  optimizer: {name: sgd, lr: 0.5}
privacy:
  target_epsilon: 8.0
  delta: 1e-4
  max_grad_norm: 0.5
  noise: secure
"""
SEARCH = """\
base: tiny.yaml
variants:
  slow: {}
  fast: {local.optimizer.lr: 1.0}
  wide: {privacy.max_grad_norm: 1.0}
select: {metric: test_accuracy, on: public_test, search: {mean: 2}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a search on a base with secure noise."""
    (tmp_path / "tiny.yaml").write_text(BASE)
    (tmp_path / "search.yaml").write_text(SEARCH)
    return tmp_path / "search.yaml"


def mistakes(file: Path, text: str, *, search: bool = True) -> list[str]:
    file.write_text(text)
    with pytest.raises(ExperimentError) as caught:
        load_comparison(file, search=search)
    return [line.replace(f"{file.parent}/", "") for line in str(caught.value).splitlines()]


def test_every_run_has_the_seed_of_the_base(file: Path) -> None:
    loaded = load_comparison(file, search=True)
    assert loaded.seeds == (0,)
    assert [one.name for one in loaded.candidates] == ["slow", "fast", "wide"]


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("base: tiny.yaml", "base: tiny.yaml\nseeds: 2", "2:1: seeds", "leave seeds out"),
        ("base: tiny.yaml", "base: tiny.yaml\nbaseline: slow", "2:1: baseline", "leave baseline"),
        ("base: tiny.yaml", "base: tiny.yaml\nclient_metrics: true", "2:1: client_", "leave cli"),
        ("on: public_test", "on: private", "6:33: select.on", "write on: public_test"),
        ("on: public_test", "on: public_data", "6:33: select.on", "write on: public_test"),
        ("test_accuracy", "client_accuracy", "6:10: select.metric", "outside of the charged runs"),
        ("slow: {}", "slow: {privacy: null}", "3:10: variants.slow.privacy", "cannot be charged"),
        (
            "slow: {}",
            "slow: {privacy.noise: seeded}",
            "3:3: variants.slow.privacy.noise",
            "anyone who knows the seed can repeat and count them",
        ),
        ("slow: {}", "slow: {runtime.engine: ray}", "3:3: variants.slow.runtime", "engine: local"),
        (
            "slow: {}",
            "slow: {runtime.trackers: [mlflow]}",
            "3:3: variants.slow.runtime.trackers",
            "leave trackers out",
        ),
        (
            "fast: {",
            "fast: {data.partition.num_clients: 4, ",
            "4:3: variants.fast.data",
            "candidates must have the same data",
        ),
        ("{mean: 2}", "{mean: 0.5}", "6:59: select.search.mean", "must be >= 1"),
        ("{mean: 2}", "{mean: 2, shape: 1.0}", "6:50: select.search", "leave shape out"),
        (
            "{mean: 2}",
            "{mean: 2, distribution: fixed}",
            "select.search.distribution",
            "must be one of 'geometric'",
        ),
        (", search: {mean: 2}", "", "6:1: select", "--select performs a search"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_its_place(
    file: Path, old: str, new: str, place: str, message: str
) -> None:
    found = mistakes(file, SEARCH.replace(old, new))
    assert any(place in line and message in line for line in found), found


def test_a_search_is_not_compared_and_a_comparison_is_not_searched(file: Path) -> None:
    (found,) = mistakes(file, SEARCH, search=False)
    assert "6:50: select.search: the file describes a search, and a comparison looks at" in found
    plain = "base: tiny.yaml\nvariants: {a: {}, b: {local.steps: 2}}\n"
    assert [line.split(": ", 1)[1] for line in mistakes(file, plain, search=False)] == [
        "seeds: missing; number of seeds (0, 1, 2, ...), or a list of seeds",
        "baseline: missing; the variant that all others are compared with",
    ]


def test_the_charge_of_a_run_is_the_plan_of_every_client(file: Path) -> None:
    plan = plan_search(load_comparison(file, search=True))
    assert [charge.client for charge in plan.clients] == [0, 1, 2]
    for charge in plan.clients:
        ((_, count),) = charge.ledger.entries
        account = charge.ledger.compose_into(PldAccountant())
        assert count == 2
        assert 7.9 < epsilon_with_slack(account.get_epsilon, charge.delta) <= 8.0
    assert plan.draws == 2 * (650 + 1)


def slow(change: str, message: str) -> Any:
    return pytest.param(change, message, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("local.batch_size: 31", "'slow' and 'fast' have other events: client 0 would be charged"),
        slow("privacy.adjacency: replace_one", "another adjacency or δ"),
        slow(
            "privacy: {target_epsilon: null, noise_multiplier: 0.0}",
            "'fast' has no finite ε, so its runs cannot be charged",
        ),
    ],
)
def test_a_candidate_with_another_event_is_refused(file: Path, change: str, message: str) -> None:
    file.write_text(SEARCH.replace("local.optimizer.lr: 1.0", change))
    with pytest.raises(SearchError, match=message):
        plan_search(load_comparison(file, search=True))


def test_a_metric_that_no_run_has_is_refused(file: Path) -> None:
    file.write_text(SEARCH.replace("test_accuracy", "test_r2"))
    with pytest.raises(SearchError, match=r"select\.metric: candidate 'slow' has no test_r2"):
        plan_search(load_comparison(file, search=True))


def test_more_noise_than_the_proof_covers_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.tools.search.plan.MAX_DRAWS", MAX_DRAWS // 10**7)
    with pytest.raises(SearchError, match=r"values of noise \(up to"):
        plan_search(load_comparison(file, search=True))


@pytest.mark.slow
def test_a_search_selects_a_model_and_verify_recomputes_both_figures(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.tools.search.ledger.RunCountDistribution.draw", lambda self: 2)
    out = file.parent / "out"
    runner = CliRunner()
    arguments = ["compare", str(file), "--select", "--out", str(out), "--workers", "1", "--json"]
    found = runner.invoke(cli, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    assert "the number of runs is secret" in found.stderr
    content = json.loads(found.stdout)
    assert content["runs"] == 2
    assert content["every_run"]["epsilon"] > 8.0
    selected = out / "selected" / "search-1"
    assert content["folder"] == str(selected)
    assert fedsim.load_model(selected)(torch.zeros(2, 64)).shape == (2, 10)
    public = json.loads((selected / "selection.json").read_text())
    assert public["epsilon"] == content["selection"]["epsilon"]
    assert public["selected"] in ("slow", "fast", "wide")
    assert 0.0 <= public["score"] <= 1.0
    assert not (out / "account" / "work").exists()
    printed = runner.invoke(cli, ["verify", str(out)], catch_exceptions=False)
    assert printed.exit_code == 0
    assert printed.stdout.startswith(f"{out}: sound\nAgainst the server and the clients")
    root = SearchLedger(out).head
    assert printed.stdout.rstrip().endswith(f"root: {root}")
    again = fedsim.search(file, out=out)
    assert (again.variant, again.selected) == (public["selected"], selected)
    plain = file.parent / "compare.yaml"
    variants = "{dp: {}, plain: {privacy: null}}"
    plain.write_text(f"base: tiny.yaml\nseeds: 2\nbaseline: dp\nvariants: {variants}\n")
    with pytest.raises(RunDirectoryError, match="holds no comparison"):
        fedsim.compare(plain, out=out)


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_a_run_that_fails_ends_the_search(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.tools.search.ledger.RunCountDistribution.draw", lambda self: 1)
    text = SEARCH.replace("slow: {}", "slow: {faults: [{kind: dropout_after, clients: [0, 1, 2]}]}")
    only = text.replace("on: public_test", "on: public_test, among: [slow]")
    file.write_text(only)
    with pytest.raises(FedsimError, match="ended without a model"):
        fedsim.search(file, out=file.parent / "out")
    assert verify_search(file.parent / "out").problems == ()


def test_the_directory_of_something_else_is_refused(file: Path) -> None:
    out = file.parent / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="is not empty and holds no search"):
        fedsim.search(file, out=out)
