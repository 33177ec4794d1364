"""A comparison shows what a mean accuracy hides: classes that a variant never finds."""

import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fedsim.comparison.differences import PairCheck
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.page import variants_table
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.text import (
    baseline_note,
    groups_table,
    recall_by_class,
    score_warnings,
    scores_json,
    scores_table,
)
from fedsim.report.contents import Scores

CONFUSIONS = {"plain": [[90, 6], [1, 3]], "private": [[96, 0], [4, 0]]}


def scores(confusion: Sequence[Sequence[int]]) -> Scores:
    columns = [sum(column) for column in zip(*confusion, strict=True)]
    rows = [
        {
            "class": name,
            "examples": sum(line),
            "predicted": columns[index],
            "recall": line[index] / sum(line),
            "precision": None,
        }
        for index, (name, line) in enumerate(zip(["healthy", "ill"], confusion, strict=True))
    ]
    sizes = [sum(line) for line in confusion]
    majority = {"class": "healthy", "share": max(sizes) / sum(sizes)}
    content: dict[str, Any] = {"confusion": confusion, "majority": majority, "by_class": rows}
    hits = sum(line[index] for index, line in enumerate(confusion))
    groups = [
        {"group": "Bern", "examples": 50, "accuracy": hits / sum(sizes)},
        {"group": "Zug", "examples": 50, "accuracy": 0.5},
    ]
    return Scores.model_validate({**content, "metrics": {}, "group": "town", "by_group": groups})


def outcome(variant: str, seed: int, found: Scores | None) -> RunOutcome:
    return RunOutcome(variant, seed, "", "completed", scores=found)


@pytest.fixture
def results() -> Results:
    variants = []
    for name, confusion in CONFUSIONS.items():
        runs = tuple(outcome(name, seed, scores(confusion)) for seed in range(2))
        variants.append(VariantResult(name, {}, runs, None))
    return Results("c", "test_accuracy", "plain", (0, 1), tuple(variants), PairCheck({}, 2))


def test_the_recall_of_each_class_stands_beside_each_other(results: Results) -> None:
    healthy, ill = recall_by_class(results)
    assert (ill.name, ill.examples, ill.recalls) == ("ill", 4, (0.75, 0.0))
    assert healthy.recalls == (0.9375, 1.0)
    assert scores_json(results.variants[1]) == {
        "majority": 0.96,
        "by_class": [{"class": "healthy", "recall": 1.0}, {"class": "ill", "recall": 0.0}],
        "by_group": [
            {"group": "Bern", "n": 2, "mean": 0.96, "sd": 0.0, "low": 0.96, "high": 0.96},
            {"group": "Zug", "n": 2, "mean": 0.5, "sd": 0.0, "low": 0.5, "high": 0.5},
        ],
    }


def test_a_variant_that_never_finds_a_class_is_named(results: Results) -> None:
    assert baseline_note(results) is not None
    found = list(score_warnings(results))
    assert "private finds no test example of class “ill” in 2 of 2 runs" in found[1]
    assert "private is no better than a constant answer in 2 of 2 runs" in found[2]
    # A model with 93 % that finds 3 of 4 is not above the 96 % of a constant one, either.
    assert found[0].startswith("plain is no better than a constant answer")
    assert len(found) == 3


def test_terminal_and_page_show_it(results: Results) -> None:
    text = StringIO()
    Console(file=text, width=80).print(scores_table(results))
    assert "ill" in text.getvalue()
    assert "75.0%" in text.getvalue()
    assert recall_by_class(results)[1].recalls[1] == 0.0


def test_groups_stand_beside_each_other_in_terminal_and_page(results: Results) -> None:
    text = StringIO()
    Console(file=text, width=80).print(groups_table(results))
    assert "Accuracy by town" in text.getvalue()
    assert re.search("private +96.0% ± 0.0 +50.0% ± 0.0", text.getvalue())
    page = variants_table(results)
    assert page["headings"][3:5] == ["accuracy, Bern", "accuracy, Zug"]
    assert page["rows"][1]["cells"][3][1] == "50.0% ± 0.0"


def test_runs_without_scores_have_no_section(results: Results) -> None:
    old = tuple(
        replace(one, outcomes=tuple(replace(run, scores=None) for run in one.outcomes))
        for one in results.variants
    )
    without = replace(results, variants=old)
    assert groups_table(without) is None
    assert scores_table(without) is baseline_note(without) is None
    assert recall_by_class(without) == []
    assert list(score_warnings(without)) == []
