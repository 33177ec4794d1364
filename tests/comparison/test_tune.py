"""Tuning before a comparison: other seeds, the best value of each variant, and its cost said."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import fedsim
from fedsim.comparison.differences import PairCheck
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.settings import TuneSettings
from fedsim.comparison.vary import FACTORS, load_candidates, tuned_comparison
from fedsim.experiment import ExperimentError

VARIANTS = {"plain": {"arm": "plain"}, "dp": {"local.optimizer.lr": 2.0}}


def loaded(directory: Path, **changes: Any) -> LoadedComparison:
    content = {"base": "tiny.yaml", "seeds": [1, 3], "baseline": "plain", "variants": VARIANTS}
    (directory / "c.yaml").write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
    return load_comparison(directory / "c.yaml")


def test_candidates_are_around_each_variants_own_value_on_seeds_that_are_not_compared(
    directory: Path,
) -> None:
    tune = TuneSettings(keys={"local.optimizer.lr": None})
    comparison, tried = load_candidates(loaded(directory), tune)
    rates = {
        name: [chosen["local.optimizer.lr"] for chosen in values.values()]
        for name, values in tried.items()
    }
    assert rates["plain"] == pytest.approx([0.5 * factor for factor in FACTORS], rel=1e-2)
    assert rates["dp"] == pytest.approx([2.0 * factor for factor in FACTORS], rel=1e-2)
    assert comparison.seeds == (0, 2)
    for variant in comparison.variants:
        assert bool(variant.experiment.not_private) is variant.name.startswith("plain")


def test_a_variant_without_a_key_does_not_tune_it(directory: Path) -> None:
    tune = TuneSettings(keys={"local.steps": [1, 2], "privacy.max_grad_norm": [0.5, 1.0]})
    _, values = load_candidates(loaded(directory), tune)
    assert [len(values[name]) for name in ("plain", "dp")] == [2, 4]
    assert set(values["plain"]["plain-steps=2"]) == {"local.steps"}


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"keys": {"privacy.target_epsilon": [1, 100]}}, "neither data nor guarantee"),
        ({"keys": {"privacy": [None]}}, "neither data nor guarantee"),
        ({"keys": {"data.partition.alpha": [1.0]}}, "neither data nor guarantee"),
        ({"keys": {"local.steps": []}}, "one value or more"),
        ({"keys": {"local.steps": [1]}, "on": "private"}, "public_data"),
    ],
)
def test_tuning_changes_no_guarantee_and_reads_nothing_private(
    directory: Path, tune: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        loaded(directory, tune=tune)


def test_a_wrong_value_is_refused_before_the_first_run(directory: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"local.steps": None}, "write local.steps=VALUE,VALUE"),
        ({"local.stepps": [1, 2]}, "did you mean 'steps'"),
        ({"local.steps": 2}, "tune.keys.'?local.steps"),
    )
    for keys, message in wrong:
        with pytest.raises(ExperimentError, match=message):
            fedsim.compare(directory / "compare.yaml", tune=keys, out=directory / "out")
    assert not (directory / "out").exists()


def test_no_value_is_lost_to_another_one_of_the_same_name(directory: Path) -> None:
    tune = TuneSettings(keys={"model.name": ["./a.py:f", "./a.py_f"]})
    with pytest.raises(ExperimentError, match=r"f' and '\./a\.py_f' have one name in results"):
        load_candidates(loaded(directory), tune)


def test_a_tuned_value_may_be_a_list_and_is_written_out(directory: Path) -> None:
    mlp = {"model": {"name": "mlp"}}
    comparison = loaded(directory, variants={"plain": {"arm": "plain", **mlp}, "dp": mlp})
    candidates = load_candidates(comparison, TuneSettings(keys={"model.args.hidden": [[8], [16]]}))
    variants = tuple(
        VariantResult(name, {}, (RunOutcome(name, 0, "", "completed", metrics=scores),), None)
        for name in ("plain-hidden=8", "plain-hidden=16", "dp-hidden=8", "dp-hidden=16")
        for scores in ({"test_accuracy": 0.9 if name.endswith("16") else 0.8},)
    )
    results = Results("c", "test_accuracy", "plain", (0,), variants, PairCheck({}, 1))
    tuned, texts = tuned_comparison(comparison, candidates, results)
    assert texts == {"plain": "hidden [16]", "dp": "hidden [16]"}
    assert [variant.experiment.model.args["hidden"] for variant in tuned.variants] == [[16], [16]]


def test_select_and_tune_exclude_each_other(directory: Path) -> None:
    select = {"metric": "test_accuracy", "on": "public_data"}
    with pytest.raises(ExperimentError, match="exclude each other"):
        loaded(directory, select=select, tune={"keys": {"local.steps": [1, 2]}})


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_the_best_values_are_compared_and_every_candidate_is_charged(directory: Path) -> None:
    loaded(directory, seeds=2)
    rates = {"local.optimizer.lr": [1e-6, 4.0]}
    result = fedsim.compare(directory / "c.yaml", tune=rates, out=directory / "out")
    changes = {variant.name: variant.changes for variant in result.results.variants}
    assert {name: change["local.optimizer.lr"] for name, change in changes.items()} == {
        "plain": 4.0,
        "dp": 4.0,
    }
    cost = result.tuning.everything
    assert (cost.runs, cost.not_private) == (4 + 8, 2 + 4)
    assert "Chosen: plain: lr 4.0 (the largest tried)" in result.tuning.statement
    assert "On charged data" in result.tuning.statement
    assert "the choice costs privacy" in result.tuning.statement
    assert result.to_json()["tuning"]["on"] == "public_test"
    assert any("arm plain" in note for note in result.to_json()["notes"])
    again = fedsim.compare(directory / "out/comparison.yaml", out=directory / "out")
    assert all(run.reused for run in again.results.outcomes)
    public = fedsim.compare(
        directory / "c.yaml", tune=rates, tune_on="public_data", out=directory / "out"
    )
    assert "If any example is private, this does not hold." in public.tuning.statement
    untuned = fedsim.compare(directory / "c.yaml", out=directory / "out")
    assert untuned.tuning.everything.runs == 4 + 8 + 4  # what was spent on tuning still counts
