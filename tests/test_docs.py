"""What the documents say is what the program does."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedsim
from fedsim.cli import cli
from fedsim.experiment import load_experiment

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").exists(), reason="reads the documents of a checkout"
)


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_the_readme_is_short_and_opens_with_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    run, test = blocks("README.md", "console")[:2]
    assert "fedsim run experiments/digits_dp.yaml" in run
    assert "python -m pytest" in test
    for command in (run, test):
        assert len(command.splitlines()) == 1
        assert "-c constraints.txt" in command
    assert lines.index(run.strip()) < 12


def test_ci_runs_the_readmes_test_command() -> None:
    assert 'bash -c "$test_command"' in (ROOT / ".ci" / "run").read_text()


def test_the_readmes_experiment_is_valid(tmp_path: Path) -> None:
    (example,) = blocks("README.md", "yaml")
    (tmp_path / "e.yaml").write_text(example)
    assert load_experiment(tmp_path / "e.yaml").experiment.federation.rounds == 40


def test_the_documented_comparison_is_the_shipped_one_shortened() -> None:
    example, *_ = (yaml.safe_load(text) for text in blocks("docs/reference/comparison.md", "yaml"))
    shipped = yaml.safe_load((ROOT / "experiments" / "compare_digits.yaml").read_text())
    assert all(example[key] == shipped[key] for key in ("base", "seeds", "baseline"))
    assert set(example["variants"]) <= set(shipped["variants"])


def test_the_documented_grid_gives_the_documented_names(tmp_path: Path) -> None:
    from fedsim.comparison.load import load_comparison

    _, text, *_ = blocks("docs/reference/comparison.md", "yaml")
    grid = yaml.safe_load(text)["variants"]
    base = {"base": str(ROOT / "experiments" / "digits_dp.yaml"), "seeds": 1}
    first = "dp-target_epsilon=8-steps=1"
    loaded = load_comparison({**base, "baseline": first, "variants": grid})
    assert [one.name for one in loaded.variants][:2] == [first, "dp-target_epsilon=8-steps=5"]
    assert f"# {first}, dp-target_epsilon=8-steps=5, ..." in text


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = blocks("README.md", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    quick = example.replace('"federation.rounds": 5', '"federation.rounds": 1')
    exec(quick, {})
    assert (tmp_path / "runs" / "x" / "report.html").exists()


def test_the_engines_example_runs() -> None:
    import torch
    from torch import nn

    from fedsim.clients import PrivacyEngine

    example, with_views = blocks("docs/start/own_loop.md", "python")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(reduction="none"),
        "features": torch.randn(1000, 4),
        "targets": torch.randint(0, 2, (1000,)),
    }
    exec(example, names)
    assert isinstance(names["epsilon"], float)
    assert 0 < names["epsilon"] < 10
    names["engine"].detach()
    settings: dict[str, Any] = {"batch_size": 32, "sample_size": 1000, "noise_multiplier": 1.1}
    engine = PrivacyEngine(model, **settings, augmentation_multiplicity=3).attach(
        names["optimizer"]
    )
    exec(with_views, names | {"engine": engine, "K": 3, "nn": nn, "augment": torch.tanh})
    assert engine.get_epsilon(1e-5) == names["epsilon"]


def test_every_command_and_option_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in cli.commands:
        assert f"fedsim {name}" in readme, name


@pytest.mark.parametrize(
    "name", ["digits_dp", "digits_dp_secure", "digits_mlp", "digits_plain", "custom_model"]
)
def test_shipped_experiments_are_valid_and_say_how_to_run_them(name: str) -> None:
    path = ROOT / "experiments" / f"{name}.yaml"
    load_experiment(path)
    assert f"#   fedsim run experiments/{name}.yaml" in path.read_text()


def test_plain_and_private_digits_differ_in_privacy_and_steps_only() -> None:
    private, plain = (
        load_experiment(ROOT / "experiments" / f"digits_{name}.yaml").experiment.model_dump()
        for name in ("dp", "plain")
    )
    assert plain["privacy"] is None
    ignored = {"name", "privacy", "local"}
    assert {k: v for k, v in private.items() if k not in ignored} == {
        k: v for k, v in plain.items() if k not in ignored
    }


def test_the_secure_digits_differ_in_secure_aggregation_only() -> None:
    plain, secure = (
        load_experiment(ROOT / "experiments" / f"{name}.yaml").experiment.model_dump()
        for name in ("digits_dp", "digits_dp_secure")
    )
    assert plain["secure_aggregation"] is None
    assert secure["secure_aggregation"]["protocol"]["name"] == "additive"
    ignored = {"name", "secure_aggregation"}
    assert all(plain[key] == secure[key] for key in plain if key not in ignored)


def test_every_fault_of_secure_aggregation_is_one_that_exists() -> None:
    from fedsim.secagg import errors

    text = (ROOT / "docs" / "explain" / "secure_aggregation.md").read_text()
    named = set(re.findall(r"`(\w+Error)`", text))
    assert len(named) >= 9
    assert all(hasattr(errors, name) for name in named)


def test_every_output_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "outputs.md").read_text()
    experiment = ROOT / "experiments" / "digits_dp_secure.yaml"
    out = fedsim.run(experiment, overrides={"federation.rounds": 1}, out=tmp_path / "r").path
    for path in out.rglob("*"):
        if path.is_file():
            assert f"`{path.relative_to(out)}`" in text, path
    documents = {
        "rounds.jsonl": json.loads((out / "rounds.jsonl").read_text()),
        "summary.json": json.loads((out / "summary.json").read_text()),
        "privacy.json": json.loads((out / "privacy.json").read_text()),
        "client": json.loads((out / "privacy.json").read_text())["clients"][0],
        "secure": json.loads((out / "privacy.json").read_text())["secure_aggregation"],
        "round": json.loads((out / "rounds.jsonl").read_text())["secure_aggregation"],
        "ledger.jsonl": json.loads((out / "ledger.jsonl").read_text().splitlines()[0]),
    }
    for name, document in documents.items():
        for key in document:
            assert f"`{key}`" in text or f'"{key}"' in text, f"{name}: {key}"


def test_every_output_of_a_comparison_is_documented() -> None:
    from fedsim.comparison.comparison_result import ComparisonResult
    from fedsim.comparison.differences import PairCheck
    from fedsim.comparison.outcomes import RunOutcome
    from fedsim.comparison.results import Results, VariantResult
    from fedsim.comparison.runs_cost import Composition, Tuning
    from fedsim.comparison.statistics import Estimate, PairedDifference

    text = (ROOT / "docs" / "reference" / "comparison.md").read_text()
    estimate = Estimate(2, 0.0, 0.0, 0.0, 0.0)
    names = set(PairedDifference(estimate, None, None, 0.5).to_json())
    variant = VariantResult("a", {}, (RunOutcome("a", 0, "", "completed"),), None)
    names |= set(variant.to_json()) | set(Composition.__dataclass_fields__)
    results = Results("r", "test_loss", "a", (0, 1), (variant,), PairCheck({}, 0))
    tuning = Tuning(everything=Composition(1, 1, None, None, None), statement="")
    names |= set(ComparisonResult(Path(), results, tuning, interrupted=False).to_json())
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing


def test_every_dependency_and_extra_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "decisions" / "dependencies.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for requirement in project["dependencies"]:
        name = re.split(r"[><=\[]", requirement)[0]
        assert any(row.startswith(f"| {name} | ") for row in rows), name
    for extra in project["optional-dependencies"]:
        assert any(f"`{extra}`" in row.split(" | ")[0] for row in rows), extra


def test_the_design_names_every_room_and_only_what_exists() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in packages["packages"]:
        assert f"{package.rsplit('.', 1)[-1]}/" in text, package
    inside = text.split("## Rooms")[1].split("\n## ")[0]
    rows = [line for line in inside.splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for line in rows:
        base = None
        for name in re.findall(r"`([\w./]+)`", line.split(" | ")[0]):
            path = ROOT / name if (ROOT / name).exists() else (base or ROOT) / name
            assert path.exists(), name
            base = path.parent
