"""The numbers of a comparison from the outcomes of its runs, also of incomplete ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.load import load_comparison
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import ComparisonError, NothingFinishedError, Results, summarise
from fedsim.comparison.runs_cost import Composition, Tuning
from fedsim.comparison.text import notes_of
from fedsim.experiment import ExperimentError

PAIRING = {"data": "a", "initial_model": "b", "participants": "c"}


def outcome(
    variant: str, seed: int, value: float | None, *, status: str = "completed", **more: float
) -> RunOutcome:
    private = variant != "plain"
    return RunOutcome(
        variant=variant,
        seed=seed,
        path=f"runs/{variant}/seed-{seed}",
        status=status,
        reason="it broke" if status == "failed" else None,
        metrics={"test_loss": 0.5, "test_accuracy": value, **more},
        is_private=private,
        epsilon=4.0 + seed if private else None,
        delta=1e-4 if private else None,
        pair_digests=PAIRING,
    )


def summarised(outcomes: list[RunOutcome], metric: str | None = None) -> Results:
    names = dict.fromkeys(run.variant for run in outcomes)
    seeds = tuple(dict.fromkeys(run.seed for run in outcomes))
    settings = {name: {"local.steps": 1} for name in names}
    return summarise(
        "tiny", outcomes, metric=metric, baseline="plain", seeds=seeds, settings=settings
    )


def runs(name: str, *values: float | None) -> list[RunOutcome]:
    return [outcome(name, seed, value) for seed, value in enumerate(values)]


def test_each_variant_has_mean_difference_and_its_largest_epsilon() -> None:
    plain, dp = runs("plain", 0.9, 0.8, 0.7), runs("dp", 0.7, 0.65, 0.6)
    found = summarised([*plain, *dp, *runs("more", 0.9, 0.8, 0.7)])
    assert found.metric == "test_accuracy"
    first, second, third = found.variants
    assert (first.difference, first.epsilon) == (None, None)
    assert second.metrics["test_accuracy"].mean == pytest.approx(0.65)
    assert second.difference is not None
    assert second.difference.estimate.mean == pytest.approx(-0.15)
    assert (second.epsilon, second.delta) == (6.0, 1e-4)
    assert third.difference is not None
    assert third.difference.estimate.mean == 0
    assert second.difference.holm_p == pytest.approx(2 * (second.difference.t_p or 0))
    assert any("adjusted for 2 comparisons" in note for note in notes_of(found))


def test_only_seeds_that_both_finished_are_paired_and_the_others_are_named() -> None:
    plain = [*runs("plain", 0.9, 0.8), outcome("plain", 2, None, status="failed")]
    dp = [outcome("dp", 0, 0.5, status="interrupted"), *runs("dp", 0.5, 0.6, 0.7)[1:]]
    found = summarised([*plain, *dp, *runs("more", 0.9, None, 0.7)])
    _, second, third = found.variants
    assert second.difference is not None
    assert second.difference.seeds == (1,)
    assert second.difference.t_p is None
    assert third.difference is not None
    assert third.difference.seeds == (0,)
    notes = "\n".join(notes_of(found))
    assert "plain: left out seed 2 (failed)" in notes
    assert "dp: left out seed 0 (interrupted)" in notes
    assert "more: left out seed 1 (its value is not finite)" in notes
    assert second.epsilon == 6.0  # of finished runs only


def test_an_infinite_epsilon_is_not_hidden_by_finite_ones() -> None:
    dp = runs("dp", 0.5, 0.6, 0.7)
    dp[1] = replace(dp[1], epsilon=None)
    found = summarised([*runs("plain", 0.9, 0.8, 0.7), *dp, *runs("more", 1, 1, 1)])
    assert found.variants[1].epsilon is None


def test_one_seed_is_said_to_show_nothing_about_chance() -> None:
    found = summarised([outcome("plain", 0, 0.9), outcome("dp", 0, 0.8)])
    assert notes_of(found) == [
        "There is one seed, so there are no intervals and no tests: run more seeds."
    ]
    content = found.variants[1].to_json()
    assert content["difference"]["mean"] == pytest.approx(-0.1)
    assert content["difference"]["low"] is content["difference"]["t_p"] is None


def test_a_metric_that_the_runs_lack_is_refused_with_those_they_have(directory: Path) -> None:
    file = directory / "compare.yaml"
    file.write_text(file.read_text() + "metric: test_r2\n")
    with pytest.raises(ExperimentError, match=r"metric: variant 'plain' has no test_r2; it has"):
        load_comparison(file)
    both = [*runs("plain", 0.9, 0.8), *runs("dp", 0.9, 0.8)]
    with pytest.raises(ComparisonError, match="no test_r2; they have test_loss, test_accuracy"):
        summarised(both, "test_r2")


def test_regressions_are_compared_by_r2() -> None:
    both = [
        replace(one, metrics={"test_loss": 1.0, "test_mse": 1.0, "test_r2": 0.3})
        for one in [*runs("plain", 0, 0), *runs("dp", 0, 0)]
    ]
    assert summarised(both).metric == "test_r2"


def test_nothing_finished_says_why() -> None:
    with pytest.raises(NothingFinishedError) as caught:
        summarised([outcome("dp", 0, None, status="failed")])
    assert str(caught.value).splitlines() == [
        "no run was finished, so there is nothing to compare",
        "runs/dp/seed-0: it broke",
    ]


def test_the_result_is_valid_json_without_nan() -> None:
    import json

    found = summarised(
        [*runs("plain", 0.9, None, 0.7), *runs("dp", 0.5, 0.5, 0.5), *runs("more", 1.0, 1.0, 1.0)],
    )
    tuning = Tuning(everything=Composition(9, 6, None, 1e-4, None), statement="nothing chosen")
    content = ComparisonResult(Path(), found, tuning, interrupted=False).to_json()
    assert json.loads(json.dumps(content, allow_nan=False))["confidence"] == 0.95


def test_variants_without_a_common_metric_are_refused() -> None:
    found = [outcome("plain", 0, 0.9), replace(outcome("dp", 0, 0.8), metrics={"test_mse": 1.0})]
    with pytest.raises(ComparisonError, match="no metric in common: plain has test_loss, test_acc"):
        summarised(found)
