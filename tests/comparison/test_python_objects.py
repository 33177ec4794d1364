"""A comparison of experiments that are Python: mappings as base, models and data as objects."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.datasets import load_iris
from torch import nn

import fedsim
from fedsim.comparison import compare as compare_module
from fedsim.core.errors import InputError
from fedsim.experiment import ExperimentError

_iris: Any = load_iris(return_X_y=True)
X, Y = _iris
FILES = ("compare.yaml", "tiny.yaml")  # of the comparison that `compared` made


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def broken() -> nn.Module:
    raise RuntimeError("out of ideas")


def experiment(model: object = "logistic", dataset: object = "iris") -> dict[str, Any]:
    return {
        "name": "cells",
        "data": {"dataset": dataset, "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": model},
        "federation": {"rounds": 2},
        "local": {"steps": 1, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }


def network(width: int) -> Callable[[], nn.Module]:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    return net


def test_a_mapping_of_built_in_names_is_compared_like_a_file(
    compared: fedsim.ComparisonResult,
    execute_jobs: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its jobs could go to worker processes, as those of the file did; here they need none."""
    comparison, base = (yaml.safe_load((compared.path.parent / name).read_text()) for name in FILES)
    content = {**comparison, "base": base, "seeds": [1]}
    executed: list[int] = []

    def execute(jobs: Any, *, workers: int, inherited: Any, **rest: Any) -> None:
        executed.append(workers)
        execute_jobs(jobs, **rest)

    monkeypatch.setattr(compare_module, "execute", execute)
    result = fedsim.compare(content, out=tmp_path / "c", workers=2)
    vary = {"privacy.target_epsilon": [None, 8.0]}
    varied = fedsim.compare(base, vary=vary, seeds=[1], out=tmp_path / "v", workers=2)
    scores = [
        [run.metrics for run in one.results.outcomes if run.seed == 1]
        for one in (compared, result, varied)
    ]
    assert scores[0] == scores[1] == scores[2]
    assert executed == [2, 2]
    assert varied.results.name == "tiny-by-target_epsilon"


def test_variants_may_be_objects_and_finished_runs_of_the_same_objects_are_kept(
    tmp_path: Path,
) -> None:
    threads = torch.get_num_threads()

    def compare(width: int, data: Any = X) -> fedsim.ComparisonResult:
        base = {**experiment(linear, (data, Y)), "privacy": None}
        models = {"model.name": [linear, network(width)]}
        return fedsim.compare(base, vary=models, seeds=1, out=tmp_path / "c")

    first = compare(8)
    assert torch.get_num_threads() == threads
    assert [variant.name for variant in first.results.variants] == ["name=linear", "name=net"]
    rows = (tmp_path / "c" / "comparison.csv").read_text().splitlines()
    assert [row["status"] for row in csv.DictReader(rows)] == ["completed"] * 2
    assert not list((tmp_path / "c").glob("superseded/*"))
    compare(8)
    assert not list((tmp_path / "c").glob("superseded/*"))
    compare(9)  # a captured number
    assert [path.name for path in (tmp_path / "c").glob("superseded/*")] == ["name=net"]
    other = X.copy()
    other[3] += 0.5
    compare(9, other)
    assert len(list((tmp_path / "c").glob("superseded/*/*"))) == 3
    recorded = (tmp_path / "c" / "comparison.yaml").read_text()
    assert "dataset: python:arrays" in recorded
    assert "model.name: python:net" in recorded


def test_a_comparison_of_objects_may_be_tuned_first(tmp_path: Path) -> None:
    result = fedsim.compare(
        {**experiment(linear, (X, Y)), "privacy": None},
        vary={"model.name": [linear, network(8)]},
        tune={"local.optimizer.lr": [0.1, 1.0]},
        seeds=1,
        out=tmp_path / "c",
    )
    assert [variant.name for variant in result.results.variants] == ["name=linear", "name=net"]
    tried = csv.DictReader((tmp_path / "c" / "tuning" / "comparison.csv").read_text().splitlines())
    assert [row["status"] for row in tried] == ["completed"] * len(
        list(result.results.variants)
    ) * 4


def test_a_failing_object_fails_its_runs_alone_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"model.name": [linear, broken]}
    base = {**experiment(linear), "privacy": None}
    result = fedsim.compare(base, vary=models, seeds=1, out=tmp_path / "c", workers=8)
    assert [run.variant for run in result.failed] == ["name=broken"]
    assert "out of ideas" in str(result.failed[0].reason)
    assert capsys.readouterr() == ("", "")
    assert "out of ideas" in (tmp_path / "c" / "workers.log").read_text()


def test_a_result_is_a_frame_and_draws_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    vary = {"privacy.target_epsilon": [None, 8.0]}
    result = fedsim.compare(experiment(linear), vary=vary, seeds=2, out=tmp_path / "c")
    frame = result.frame()
    assert frame.groupby("variant")["test_accuracy"].count().tolist() == [2, 2]
    for variant in result.results.variants:
        scores = frame[frame["variant"] == variant.name]["test_accuracy"].tolist()
        assert np.mean(scores) == pytest.approx(variant.metrics["test_accuracy"].mean)
    saved = {path.stem for path in (tmp_path / "c" / "figures").glob("*.svg")}
    for name in saved:
        drawn = result.figure(name)._repr_svg_()
        assert drawn == (tmp_path / "c" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert result.figure()._repr_svg_().startswith("<?xml")
    with pytest.raises(InputError, match=r"there is no figure 'round'; there are .*rounds"):
        result.figure("round")


def test_mistakes_name_the_base_or_the_variant(tmp_path: Path) -> None:
    base = experiment(linear)
    base["model"]["nam"] = 1
    content = {
        "base": base,
        "seeds": 2,
        "baseline": "plain",
        "variants": {"plain": {"privacy": None}, "net": {"model": {"name": linear()}}},
    }
    with pytest.raises(ExperimentError) as caught:
        fedsim.compare(content, out=tmp_path / "c")
    assert str(caught.value).splitlines() == [
        "variants.net.model.name: a Linear is no class or function; give one, uncalled, and its "
        "arguments as args",
        "base: model.nam: unknown key; did you mean 'name'?",
    ]
    with pytest.raises(
        ExperimentError, match="this is an experiment, not a comparison: give vary="
    ):
        fedsim.compare(experiment(linear), out=tmp_path / "c")


def test_a_search_refuses_objects_before_it_draws(tmp_path: Path) -> None:
    base = experiment(linear)
    base["privacy"] = {**base["privacy"], "noise": "secure"}
    select = {"metric": "test_accuracy", "on": "public_test", "search": {"mean": 2}}
    content = {"base": base, "variants": {"a": {}, "b": {"local.steps": 2}}, "select": select}
    with pytest.raises(
        ExperimentError, match="a search runs in other processes, which do not have python:linear"
    ):
        fedsim.search(content, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_an_inline_base_is_for_python_and_a_file_names_a_file(tmp_path: Path) -> None:
    content = {"base": experiment(), "seeds": 1, "baseline": "a", "variants": {"a": {}, "b": {}}}
    (tmp_path / "c.yaml").write_text(json.dumps(content))
    with pytest.raises(ExperimentError, match="base: must be a string"):
        fedsim.compare(tmp_path / "c.yaml", out=tmp_path / "c")
