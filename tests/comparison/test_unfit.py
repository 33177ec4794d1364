"""A variant that learnt nothing, or less than it could, is named, and never compared with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedsim.comparison.comparison_result import ComparisonResult, latex_tables
from fedsim.comparison.jobs import MARKER
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.page import render_comparison
from fedsim.comparison.results import Results, summarise
from fedsim.comparison.runs_cost import Composition, Tuning
from fedsim.comparison.terminal import print_comparison
from fedsim.comparison.text import score_warnings, unfit_sentences
from fedsim.comparison.unfit import UnfitVariant
from fedsim.report.contents import Scores

HEALTHY, ILL = 40, 60
ENTROPY = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6))
PRIVATE = {"privacy.target_epsilon": 8.0, "privacy.max_grad_norm": 1.0, "privacy.delta": 1e-4}
SETTINGS: dict[str, object] = {
    "data.partition.num_clients": 5,
    "federation.strategy": "fedavg",
    "local.optimizer.lr": 1.0,
    "local.steps": 2,
    "model.name": "mlp",
}


def scores(healthy: int, ill: int, **metrics: float) -> Scores:
    """Return scores of a test set with 60 ill of 100, by the right predictions of each class."""
    predicted = healthy + ILL - ill, ill + HEALTHY - healthy
    rows = [
        {"class": name, "examples": size, "predicted": found, "recall": hits / size, "precision": 0}
        for name, size, found, hits in zip(
            ("healthy", "ill"), (HEALTHY, ILL), predicted, (healthy, ill), strict=True
        )
    ]
    majority = {"class": "ill", "share": 0.6}
    content: dict[str, Any] = {"confusion": None, "majority": majority, "by_class": rows}
    return Scores.model_validate({**content, "metrics": metrics})


@dataclass(frozen=True)
class Variant:
    """A variant by the accuracies of its seeds, and what else differs from a usual one."""

    name: str
    accuracies: Sequence[float]
    epsilon: float | None = None
    clips: bool = False
    loss: float | None = 0.3
    changes: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def unit(self) -> str | None:
        return None if self.epsilon is None else "example"

    @property
    def settings(self) -> Mapping[str, object]:
        if self.clips:
            noise = {"privacy.target_epsilon": None, "privacy.noise_multiplier": 0.0}
            return {**SETTINGS, **PRIVATE, **noise, **self.changes}
        if self.epsilon is None:
            return {**SETTINGS, "privacy": None, **self.changes}
        return {**SETTINGS, **PRIVATE, "privacy.target_epsilon": self.epsilon, **self.changes}

    def outcome(self, seed: int) -> RunOutcome:
        accuracy = self.accuracies[seed]
        found = scores(
            round(100 * accuracy) - ILL if accuracy >= 0.6 else 0, min(ILL, round(100 * accuracy))
        )
        constant = found.constant_metrics("cross_entropy")
        return RunOutcome(
            variant=self.name,
            seed=seed,
            path=f"runs/{self.name}/seed-{seed}",
            status="completed",
            metrics={"test_loss": self.loss, "test_accuracy": accuracy, **self.metrics},
            is_private=self.epsilon is not None,
            epsilon=self.epsilon,
            delta=None if self.epsilon is None else 1e-4,
            pair_digests={"data": "a", "initial_model": "b", "participants": "c"},
            trust=None if self.epsilon is None else "local",
            unit=self.unit,
            scores=found,
            constant_metrics={f"test_{name}": value for name, value in constant.items()},
        )


def compared(*variants: Variant, metric: str = "test_accuracy") -> Results:
    runs = [one.outcome(seed) for one in variants for seed in range(len(one.accuracies))]
    return summarise(
        "given",
        runs,
        metric=metric,
        baseline=variants[0].name,
        seeds=tuple(range(len(variants[0].accuracies))),
        settings={one.name: one.settings for one in variants},
    )


def only(results: Results) -> UnfitVariant:
    (entry,) = results.unfit
    return entry


GOOD, BETTER = (0.80, 0.82, 0.81), (0.90, 0.92, 0.91)
DIVERGED = Variant("plain", (0.6, 0.6, 0.6), loss=41.0)
EPS = Variant("eps", GOOD, epsilon=8.0)


def test_a_constant_answer_is_as_good_as_its_metrics_say() -> None:
    found = scores(0, ILL).constant_metrics("cross_entropy")
    assert found["accuracy"] == 0.6
    assert found["balanced_accuracy"] == 0.5
    assert found["loss"] == found["log_loss"] == pytest.approx(ENTROPY)
    assert "loss" not in scores(0, ILL).constant_metrics("./own.py:loss")
    content = {"by_class": [], "confusion": None, "majority": None}
    regression = Scores.model_validate({**content, "metrics": {"mse": 3.0, "r2": 0.25}})
    assert regression.constant_metrics("mse")["loss"] == pytest.approx(4.0)


def test_a_variant_at_the_majority_baseline_is_named_with_its_answer() -> None:
    results = compared(DIVERGED, EPS)
    entry = only(results)
    assert (entry.variant, entry.answer, entry.is_constant) == ("plain", "ill", True)
    assert entry.has_useless_loss
    sentence = unfit_sentences(results)["plain"]
    assert sentence.startswith(
        "plain is no better than always answering “ill” (test accuracy 60.0%"
    )
    assert "a test loss of 41, above 0.673 of a constant answer" in sentence
    assert sentence.endswith(": compare nothing with it.")
    assert not any("constant answer" in warning for warning in score_warnings(results))


def test_nothing_shows_a_difference_from_it(tmp_path: Path) -> None:
    results = compared(DIVERGED, EPS)
    assert [variant.difference for variant in results.variants] == [None, None]
    (tmp_path / MARKER).write_text("name: given\n")
    (tmp_path / "runs/eps/seed-0").mkdir(parents=True)
    (tmp_path / "runs/eps/seed-0/privacy.json").write_text('{"schema": 3, "statement": "s"}')
    tuning = Tuning(everything=Composition(6, 3, 1.0, 1e-4, 1.0), statement="nothing chosen")
    result = ComparisonResult(tmp_path, results, tuning, False)
    text = StringIO()
    print_comparison(result, Console(file=text, width=200))
    page = render_comparison(result)
    for shown in (text.getvalue(), page, latex_tables(results), result._repr_html_()):
        assert "compare nothing with it" in shown
        assert "+21" not in shown
        assert "+0.21" not in shown
    assert text.getvalue().startswith("warning: plain is no better")
    assert page.index("No fair comparison with plain") < page.index('class="cards"')
    assert result.to_json()["variants"][1]["difference"] is None
    assert result.to_json()["unfit"][0]["sentence"] in text.getvalue()


def test_the_difference_of_an_unfit_variant_stays_and_is_marked() -> None:
    constant = Variant("eps", (0.6, 0.58, 0.6), epsilon=8.0)
    results = compared(Variant("plain", BETTER), constant)
    assert only(results).variant == "eps"
    assert results.variants[1].difference is not None
    assert r"$^\dagger$" in latex_tables(results)


def test_a_rare_class_does_not_make_a_good_ranking_constant() -> None:
    ranked = Variant("eps", (0.6, 0.59, 0.6), epsilon=8.0, metrics={"test_auc": 0.9})
    plain = Variant("plain", BETTER, metrics={"test_auc": 0.95})
    assert compared(plain, ranked, metric="test_auc").unfit == ()
    worse = Variant("eps", GOOD, epsilon=8.0, metrics={"test_auc": 0.5})
    assert only(compared(plain, worse, metric="test_auc")).constant == 0.5


def test_a_loss_counts_where_it_is_not_finite_or_nothing_else_speaks_for_the_model() -> None:
    # A client's own model is sure of itself: a large loss at a useful accuracy.
    assert compared(EPS, Variant("alone", GOOD, epsilon=8.0, loss=4.3)).unfit == ()
    assert only(compared(EPS, Variant("odd", GOOD, epsilon=8.0, loss=None))).has_useless_loss
    unclear = Variant("odd", (0.95, 0.61, 0.61), epsilon=8.0, loss=4.3)
    assert only(compared(EPS, unclear)).has_useless_loss


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (Variant("more", GOOD), Variant("less", BETTER, epsilon=8.0)),
        (Variant("more", GOOD), Variant("less", BETTER, clips=True)),
        (Variant("more", GOOD, clips=True), Variant("less", BETTER, epsilon=8.0)),
        (Variant("more", GOOD, epsilon=8.0), Variant("less", BETTER, epsilon=1.0)),
        (
            Variant("more", GOOD, epsilon=8.0, changes={"local.optimizer.lr": 3.0}),
            Variant("less", BETTER, epsilon=8.0, changes={"federation.strategy": "local_only"}),
        ),
        (
            Variant("more", GOOD, epsilon=8.0, changes={"data.partition.num_clients": 1}),
            Variant("less", BETTER, epsilon=1.0),
        ),
    ],
)
def test_worse_than_with_less_information_is_named(more: Variant, less: Variant) -> None:
    assert only(compared(less, more)).worse_than == ("less",)
    assert "which had less information" in unfit_sentences(compared(more, less))["more"]
    better = [Variant("more", BETTER, more.epsilon, more.clips, changes=more.changes)]
    worse = [Variant("less", GOOD, less.epsilon, less.clips, changes=less.changes)]
    assert compared(*better, *worse).unfit == ()


@pytest.mark.parametrize(
    ("changes", "accuracies"),
    [
        ({"model.name": "cnn"}, BETTER),  # another model may be better by itself
        ({"local.steps": 5}, BETTER),
        ({"privacy.mechanism": "output_perturbation"}, BETTER),
        ({}, (0.99, 0.70, 0.90)),  # within the interval
        ({}, (0.99,)),  # one seed has no interval
    ],
)
def test_what_information_does_not_explain_is_not_named(
    changes: Mapping[str, object], accuracies: Sequence[float]
) -> None:
    more = Variant("more", GOOD[: len(accuracies)], epsilon=8.0)
    assert compared(more, Variant("less", accuracies, epsilon=1.0, changes=changes)).unfit == ()


def test_a_model_for_each_group_may_be_better_on_groups_than_a_common_one() -> None:
    by_group = [{"test_group_accuracy": value} for value in (0.80, 0.90)]
    changes = {"federation.strategy": "local_only"}
    together = Variant("together", GOOD, epsilon=8.0, metrics=by_group[0])
    alone = Variant("alone", GOOD, epsilon=8.0, changes=changes, metrics=by_group[1])
    assert compared(together, alone, metric="test_group_accuracy").unfit == ()
    less = Variant("less", GOOD, epsilon=1.0, metrics=by_group[1])
    assert only(compared(together, less, metric="test_group_accuracy")).worse_than == ("less",)


def test_many_equal_variants_are_rarely_called_worse_by_chance() -> None:
    """The interval of a pair widens with the number of pairs: 95 % holds for all together."""
    first, second = (0.80, 0.82, 0.81, 0.83), (0.83, 0.84, 0.85, 0.85)
    pair = Variant("e8", first, epsilon=8.0), Variant("e1", second, epsilon=1.0)
    assert only(compared(*pair)).variant == "e8"
    others = [Variant(f"e{n}", first, epsilon=float(n)) for n in range(10, 16)]
    assert compared(*pair, *others).unfit == ()
