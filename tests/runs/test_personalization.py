"""Runs with `personalization:`: nothing of it reaches an upload, and scores are of public data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedsim
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.models.tasks import evaluate
from fedsim.personalization import personalize
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.private_files import DeploymentError

METHODS = (
    {"method": "fine_tune", "steps": 10, "lr": 0.5},
    {"method": "ditto", "steps": 10, "lr": 0.5},
    {"method": "label_prior"},
)
TUNED = {**METHODS[0], "holdout": 0.25, "public_data": True}


def experiment(personalization: dict[str, Any] | None = TUNED, **sections: Any) -> dict[str, Any]:
    return {
        "name": "personal",
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": 4, "min_examples": 20},
        },
        "model": {"name": "logistic"},
        "federation": {"rounds": 3, "clients_per_round": 3},
        "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
        "personalization": personalization,
        **sections,
    }


def run(out: Path, *arguments: Any, **sections: Any) -> Path:
    return run_experiment(experiment(*arguments, **sections), out=out).path


def read(path: Path, name: str = "personalization.json") -> dict[str, Any]:
    return json.loads((path / name).read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedsim.RunResult:
    return fedsim.run(experiment(), out=tmp_path_factory.mktemp("personal") / "whole")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without personal models."""
    return run(tmp_path_factory.mktemp("personal") / "without", None)


def test_scores_are_those_of_models_made_by_hand(whole: fedsim.RunResult) -> None:
    result = whole
    federation = assemble(load_experiment(experiment()), ledger=None)
    model, held_out = federation.model.module, federation.data.held_out
    assert held_out is not None
    model.load_state_dict(load_file(str(result.path / "model.safetensors")))
    content = read(result.path)
    right = 0.0
    for row, own, rest in zip(content["clients"], federation.data.clients, held_out, strict=True):
        assert (row["examples"], row["held_out"]) == (len(own), len(rest))
        found = fedsim.personalize(model, own.features, own.targets, TUNED, client=row["client"])
        scores = evaluate(found, federation.model.loss, federation.model.task, rest)
        assert row["personal"] == scores
        assert row["global"] == evaluate(model, federation.model.loss, federation.model.task, rest)
        right += scores["accuracy"] * len(rest)
    assert content["personal"]["accuracy"] == pytest.approx(right / content["held_out"])
    assert result.metrics["personal_accuracy"] == content["personal"]["accuracy"]
    assert content["personal"]["accuracy"] > content["global"]["accuracy"] + 0.1
    assert verify_run(RunDirectory.open(result.path)).problems == ()
    assert read(result.path, "summary.json")["personalization"]["figures_of"] == "public data"
    page = (result.path / "report.html").read_text()
    assert "Personal models, on public data" in page
    assert "Figures of public data" in page


def test_without_public_data_nothing_is_computed_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    personal_model = personalize.personal_model

    def watched(settings: Any, model: Any, loss: Any, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(x)
        return personal_model(settings, model, loss, x, *rest)

    monkeypatch.setattr(personalize, "personal_model", watched)
    path = run(tmp_path / "run", {**TUNED, "public_data": False})
    test = assemble(load_experiment(experiment()), ledger=None).data.test
    assert [x.tolist() for x in seen[:1]] == [test.features[:3].tolist()], "the public trial"
    assert all(x.tolist() == seen[0].tolist() for x in seen)
    assert not (path / "personalization.json").exists()
    assert "personalization" not in read(path, "summary.json")
    assert verify_run(RunDirectory.open(path)).problems == ()


@pytest.mark.slow
def test_the_statement_says_that_no_epsilon_covers_a_personal_model(
    whole: fedsim.RunResult, without: Path
) -> None:
    with_one = read(whole.path, "privacy.json")
    assert "No ε covers a personal model or a score of it" in with_one["statement"]
    assert "personal" not in read(without, "privacy.json")["statement"]


@pytest.mark.slow
def test_an_interrupted_run_has_no_scores_until_it_is_resumed(
    whole: fedsim.RunResult, tmp_path: Path, stop_after: Any
) -> None:
    parts = tmp_path / "parts"
    run_experiment(experiment(), out=parts, callback=stop_after(1))
    assert not (parts / "personalization.json").exists()
    assert verify_run(RunDirectory.open(parts)).problems == ()
    run_experiment(experiment(), out=parts, resume=True)
    assert read(parts) == read(whole.path)


@pytest.mark.slow
def test_verify_finds_forged_scores(whole: fedsim.RunResult, without: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole.path, tmp_path / "run"))
    content, summary = read(path), read(path, "summary.json")

    def problems(name: str, changed: object) -> str:
        (path / name).write_text(json.dumps(changed))
        found = "\n".join(verify_run(RunDirectory.open(path)).problems)
        (path / "personalization.json").write_text(json.dumps(content))
        (path / "summary.json").write_text(json.dumps(summary))
        return found

    better = {**content["personal"], "accuracy": 1.0}
    forged = {**summary, "personalization": {**summary["personalization"], "personal": better}}
    assert "in summary.json are not those of" in problems("summary.json", forged)
    forged = {**content, "personal": better}
    assert "are not the means over its clients" in problems("personalization.json", forged)
    forged = {**content, "settings": {**content["settings"], "lr": 9.0}}
    assert "are not those of experiment.yaml" in problems("personalization.json", forged)
    nothing = {**content["clients"][0], "personal": None}
    forged = {**content, "clients": [nothing, *content["clients"][1:]]}
    assert "no run writes such content" in problems("personalization.json", forged)
    (path / "personalization.json").unlink()
    assert "personalization.json is missing" in problems("summary.json", summary)
    other = Path(shutil.copytree(without, tmp_path / "other"))
    (other / "personalization.json").write_text(json.dumps(content))
    found = verify_run(RunDirectory.open(other)).problems
    assert any("does not declare public data" in problem for problem in found)


@pytest.mark.slow
def test_a_comparison_compares_personal_models(tmp_path: Path, jobs_here: None) -> None:
    comparison = {
        "base": experiment(),
        "seeds": 2,
        "baseline": "tuned",
        "metric": "personal_accuracy",
        "variants": {
            "tuned": {},
            "slow": {"personalization.lr": 0.1},
        },
    }
    (tmp_path / "base.yaml").write_text(json.dumps(comparison.pop("base")))
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({**comparison, "base": "base.yaml"}))
    found = fedsim.compare(file, out=tmp_path / "out")
    table = json.loads((found.path / "comparison.json").read_text())
    assert table["metric"] == "personal_accuracy"
    assert "on public data" in (found.path / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"personalization.holdout": None}, "public_data: true computes scores"),
        (
            {"privacy.adjacency": {"name": "add_remove", "declared_examples": 100}},
            "one more example would change which ones a client holds out",
        ),
        ({"privacy": None, "evaluation": {"holdout": 0.5}}, "a client holds out its examples once"),
        ({"personalization.method": "label"}, "method"),
    ],
)
def test_impossible_combinations_are_reported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load_experiment(experiment(), changes)


def test_a_label_prior_needs_classes() -> None:
    settings = experiment(METHODS[2], model={"name": "logistic", "loss": "mse"})
    with pytest.raises(ExperimentError, match="loss mse has no classes"):
        load_experiment(settings)


def test_a_wrong_parameter_is_known_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no trainable parameter"):
        run(tmp_path / "run", {**METHODS[0], "parameters": ["head"]})
    assert not (tmp_path / "run").exists()


def test_a_deployment_scores_no_personal_model(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="public_data=false"):
        write_app(load_experiment(experiment()), tmp_path / "app")
    write_app(load_experiment(experiment(METHODS[0])), tmp_path / "app")
