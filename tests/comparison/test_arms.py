"""Arms of a comparison: each is an ordinary experiment, with the batches and steps of the base."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.comparison.compare import compare
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.comparison.text import guarantee_text
from fedsim.comparison.variants import ARMS
from fedsim.data import load_federated_data
from fedsim.experiment import Experiment, load_experiment
from fedsim.experiment.errors import ExperimentError

BASE: dict[str, Any] = {
    "name": "base",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 10, "alpha": 0.5, "min_examples": 5},
    },
    "model": {"name": "logistic", "features": ["unit_norm"]},
    "federation": {"rounds": 2, "clients_per_round": 5, "weighting": "examples_over_noise"},
    "local": {"steps": 3, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "trust": {"name": "distributed", "colluding_clients": 2},
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
    },
    "secure_aggregation": {"protocol": "additive", "min_clients": 4},
}
BASE["local"]["steps"] = 1


def load(path: Path, variants: dict[str, Any], base: dict[str, Any] | None = None) -> Any:
    (path / "base.yaml").write_text(yaml.safe_dump(base or BASE, sort_keys=False))
    content = {"base": "base.yaml", "seeds": 1, "baseline": "gradient"}
    content["variants"] = {"gradient": {}, **variants}
    (path / "c.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return load_comparison(path / "c.yaml")


def experiment(comparison: LoadedComparison, name: str) -> Experiment:
    (variant,) = [one for one in comparison.variants if one.name == name]
    return variant.experiment


def test_each_arm_is_an_experiment_that_fedsim_run_takes(tmp_path: Path) -> None:
    decay = {"privacy.mechanism.max_feature_norm": 1.0, "local.optimizer.weight_decay": 0.1}
    own = {arm: {"arm": arm, **(decay if "perturb" in arm else {})} for arm in ARMS}
    comparison = load(tmp_path, own)
    assert [one.arm for one in comparison.variants] == [None, *ARMS]
    found = {name: experiment(comparison, name) for name in own}
    for each in found.values():
        assert load_experiment(each.model_dump(mode="json")).experiment == each
    assert found["plain"].privacy is None
    clipped = found["clipping_only"].privacy
    assert clipped is not None
    assert (clipped.noise_multiplier, clipped.adds_noise) == (0.0, False)
    assert (clipped.max_grad_norm, clipped.trust.name) == (0.5, "local")
    for name in ("pooled", "local_only", "output_perturbation", "input_perturbation"):
        privacy = found[name].privacy
        assert privacy is not None
        assert (privacy.trust.name, privacy.noise_multiplier) == ("local", 1.0)
        assert found[name].secure_aggregation is None
    assert found["local_only"].federation.algorithm.name == "local_only"
    assert found["input_perturbation"].privacy is not None
    assert found["input_perturbation"].privacy.mechanism.name == "input_perturbation"


def test_pooled_has_all_examples_and_the_batch_of_a_round(tmp_path: Path) -> None:
    comparison = load(tmp_path, {"pooled": {"arm": "pooled"}})
    pooled, base = experiment(comparison, "pooled"), experiment(comparison, "gradient")
    assert pooled.local.batch_size == 5 * 8
    assert (pooled.local.steps, pooled.federation.rounds) == (1, 2)
    one, ten = (load_federated_data(each.data, seed=0, base=tmp_path) for each in (pooled, base))
    assert list(one.clients.sizes) == [sum(ten.clients.sizes)]
    assert (one.test.targets == ten.test.targets).all()


def test_overrides_beside_an_arm_precede_it(tmp_path: Path) -> None:
    comparison = load(
        tmp_path, {"pooled": {"arm": "pooled", "local.batch_size": 7, "federation.rounds": 9}}
    )
    pooled = experiment(comparison, "pooled")
    assert (pooled.local.batch_size, pooled.federation.rounds) == (7, 9)


def test_a_grid_may_stand_beside_an_arm(tmp_path: Path) -> None:
    comparison = load(tmp_path, {"pooled": {"arm": "pooled", "grid": {"local.batch_size": [7, 9]}}})
    sizes = [one.experiment.local.batch_size for one in comparison.variants[1:]]
    assert sizes == [7, 9]


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ({"arm": "poled"}, {}, "did you mean"),
        ({"arm": 3}, {}, "no such arm"),
        ({"arm": "pooled"}, {"data": {"partition": {"scheme": "./f.py:g"}}}, "may leave some out"),
        ({"arm": "pooled"}, {"privacy": {"clients": {"3": {"delta": 1e-4}}}}, "one client"),
        ({"arm": "clipping_only"}, {"privacy": {"clients": {"3": {"delta": 1e-4}}}}, "everybody"),
        (
            {"arm": "clipping_only"},
            {"privacy": {"mechanism": {"name": "output_perturbation", "max_feature_norm": 1.0}}},
            "clips none",
        ),
        (
            {"arm": "pooled"},
            {"privacy": {"unit": "client", "max_update_norm": 1.0}},
            "protect everything from everybody",
        ),
    ],
)
def test_an_arm_that_there_is_not_is_reported_where_it_stands(
    variant: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = {**BASE, **{key: {**BASE[key], **value} for key, value in changes.items()}}
    with pytest.raises(ExperimentError, match=message) as caught:
        load(tmp_path, {"own": variant}, base)
    assert any(
        "variants.own.arm" in str(one) and "c.yaml" in str(one) for one in caught.value.problems
    )


def finite_epsilons(content: object, inside: bool = False) -> Iterator[float]:
    """Yield every number in the JSON value of a key that names an ε."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from finite_epsilons(value, inside or "epsilon" in key or key == "certificates")
    elif isinstance(content, list):
        for value in content:
            yield from finite_epsilons(value, inside)
    elif inside and isinstance(content, int | float):
        yield content


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_the_page_says_what_each_arm_protects_and_of_clipping_without_noise_nothing(
    tmp_path: Path,
) -> None:
    base = {**BASE, "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5}}
    base = {**base, "federation": {"rounds": 1}, "secure_aggregation": None}
    arms = {"clipped": "clipping_only", "pooled": "pooled", "local": "local_only"}
    load(tmp_path, {name: {"arm": arm} for name, arm in arms.items()}, base)
    result = compare(tmp_path / "c.yaml", out=tmp_path / "out")
    private, clipped, *_ = result.to_json()["variants"]
    assert private["private"] is True
    assert set(finite_epsilons(private)) == {private["epsilon"]}
    assert clipped["private"] is False
    assert list(finite_epsilons(clipped)) == []
    run = tmp_path / "out/runs/clipped/seed-0"
    written = json.loads((run / "privacy.json").read_text())
    assert written["private"] is False
    assert list(finite_epsilons({key: written[key] for key in ("system_epsilon", "clients")})) == []
    assert guarantee_text(result.results.variants[1]) == "none"
    assert "the other 1 had no privacy" in result.tuning.statement
    page = (result.path / "comparison.html").read_text()
    assert "get no noise" in page
    assert "nothing protects them from the holder" in page
    assert "means over the clients" in page
