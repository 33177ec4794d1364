"""The page of sharp edges describes this code: files exist, and what it refuses is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedsim
from fedsim.clients.model_checks.safety import UnsafeModelError, check_private_model
from fedsim.experiment import load_experiment
from fedsim.planning.projection import plan_experiment
from fedsim.runs.runner import run_experiment
from fedsim.statement.facts import ADJACENCIES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explain" / "sharp_edges.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")

EXPERIMENT: dict[str, Any] = {
    "name": "edges",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 32},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


def test_every_edge_names_a_file_that_exists() -> None:
    text = PAGE.read_text()
    edges = re.findall(r"^- \*\*(.+?)\*\*", text, flags=re.MULTILINE)
    files = re.findall(r"\[`([\w/.]+)`\]", text)
    assert len(edges) == len(files) >= 25
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_it_is_linked_from_the_readme_and_named_by_the_report() -> None:
    assert "(docs/explain/sharp_edges.md)" in (ROOT / "README.md").read_text()
    template = ROOT / "fedsim" / "report" / "report.html.jinja"
    assert "docs/explain/sharp_edges.md" in template.read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {
                "privacy.adjacency": {"name": "add_remove", "declared_examples": 700},
                "federation.weighting": "examples",
            },
            "reveal client sizes",
        ),
        ({"privacy.adjacency": "add_remove"}, "missing; public number of examples, such as 1000"),
        ({"privacy.sampling": "fixed_size"}, "no guarantee under adjacency zero_out"),
    ],
)
def test_combinations_without_a_guarantee_are_refused(
    tmp_path: Path, overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(fedsim.ExperimentError, match=said):
        run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "r")


def test_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(UnsafeModelError, match="mixes the examples of a batch"):
        check_private_model(model, torch.zeros(2, 4))


def test_replace_one_costs_more_than_the_others() -> None:
    spent = {}
    for adjacency in ADJACENCIES:
        declared = {"declared_examples": 700} if adjacency == "add_remove" else {}
        overrides = {"privacy.adjacency": {"name": adjacency, **declared}}
        spent[adjacency] = plan_experiment(load_experiment(EXPERIMENT, overrides)).system_epsilon
    assert spent["replace_one"] > max(spent["zero_out"], spent["add_remove"])


def test_the_seed_of_the_noise_is_in_the_run_directory(tmp_path: Path) -> None:
    path = fedsim.run(EXPERIMENT, overrides={"seed": 8191}, out=tmp_path / "r").path
    assert "seed: 8191" in (path / "experiment.yaml").read_text()
    assert "seed: 8191" in (path / "report.html").read_text()
