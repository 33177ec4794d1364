"""Variants of two units of privacy are never compared with each other."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedsim.comparison.comparison_result import ComparisonResult, _table_of_runs
from fedsim.comparison.differences import group_by_unit, unit_problems
from fedsim.comparison.page import render_comparison
from fedsim.comparison.results import Results
from fedsim.comparison.terminal import print_comparison
from fedsim.core.text_formats import csv_text

UNITS = {"none": None, "local": "example", "sums": "example", "users": "client", "dp-avg": "client"}
BASELINES = {"example": "none", "client": "users"}


def test_each_unit_has_its_own_variants_and_baseline() -> None:
    example, client = group_by_unit(UNITS, BASELINES)
    assert (example.unit, example.names) == ("example", ("none", "local", "sums"))
    assert example.pairs == (("local", "none"), ("sums", "none"))
    assert (client.unit, client.names) == ("client", ("users", "dp-avg"))
    assert client.pairs == (("dp-avg", "users"),)


def test_one_unit_is_one_group_as_ever() -> None:
    (found,) = group_by_unit({"a": None, "b": "example", "c": None}, "a")
    assert found.pairs == (("b", "a"), ("c", "a"))


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("local", "'local' has unit example, and an ε of unit client cannot be compared with it"),
        ({"example": "local"}, "names no variant for unit client; add client: NAME"),
        ({"example": "local", "client": "sums"}, "'sums' has unit example"),
        ({"example": "local", "client": "users"}, "has no privacy, hence no unit"),
    ],
)
def test_a_baseline_of_another_unit_is_refused(
    baseline: str | dict[str, str], message: str
) -> None:
    ((_, found), *_) = unit_problems(UNITS, baseline)
    assert message in found


def test_baselines_within_the_units_are_no_problem() -> None:
    assert not list(unit_problems(UNITS, BASELINES))
    assert not list(unit_problems(UNITS, "none"))


@pytest.fixture
def mixed(compared: ComparisonResult) -> ComparisonResult:
    """The compared runs under four names: two of each unit, in different trust models."""
    plain, dp = compared.results.variants
    looks = (
        ("a-local", "local", "example", {"server": 8.0}),
        ("a-sums", "distributed", "example", {"sums": 8.0, "server": 20.0}),
        ("b-sums", "distributed", "client", {"sums": 8.0, "server": 20.0}),
        ("b-central", "central", "client", {"models": 8.0}),
    )
    variants = [
        replace(
            dp,
            name=name,
            difference=dp.difference if name in ("a-sums", "b-central") else None,
            unfit=None,
            outcomes=tuple(
                replace(run, variant=name, trust=trust, unit=unit, certificates=certificates)
                for run in dp.outcomes
            ),
        )
        for name, trust, unit, certificates in looks
    ]
    results = replace(
        compared.results,
        variants=(plain, *variants),
        baseline={"example": "plain", "client": "b-sums"},
    )
    return replace(compared, results=results)


def test_no_table_and_no_figure_of_the_page_has_two_units(mixed: ComparisonResult) -> None:
    page = render_comparison(mixed)
    tables = re.findall(r'aria-label="(Variants[^"]*)">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert [label for label, _ in tables] == ["Variants of unit example", "Variants of unit client"]
    for (_, rows), own, others in zip(tables, "ab", "ba", strict=True):
        assert f">{own}-sums" in rows
        assert f">{others}-sums" not in rows
    for label in re.findall(r'aria-label="([^"]*95 % intervals[^"]*)"', page):
        assert not ("a-sums" in label and "b-sums" in label)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "minus plain" in tables_head(page, "example")
    assert "minus b-sums" in tables_head(page, "client")
    assert "sums (server: ε ≤ 20)" in page


def tables_head(page: str, unit: str) -> str:
    return page.split(f'aria-label="Variants of unit {unit}"')[1].split("</thead>")[0]


def test_the_terminal_has_a_table_for_each_unit_with_its_observers(
    mixed: ComparisonResult,
) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(mixed, console)
    text = console.export_text()
    example, client = text.index("unit example"), text.index("unit client")
    assert example < text.index("a-sums") < client < text.index("b-sums", client)
    assert "b-" not in text[example : client - 40].replace("baseline", "")
    assert re.search(r"a-sums +ε ≤ 8, sums", text)
    assert re.search(r"b-central +ε ≤ 8, models", text)


def test_json_and_table_name_unit_trust_and_observer(mixed: ComparisonResult) -> None:
    results: Results = mixed.results
    content = mixed.to_json()
    assert content["baseline"] == {"example": "plain", "client": "b-sums"}
    central = content["variants"][-1]
    assert (central["unit"], central["trust"], central["against"]) == (
        "client",
        "central",
        "models",
    )
    assert central["certificates"] == {"models": 8.0}
    assert any("cannot be compared" in note for note in content["notes"])
    rows = list(csv.DictReader(io.StringIO(csv_text(*_table_of_runs(results)))))
    sums = next(row for row in rows if row["variant"] == "a-sums")
    assert (sums["trust"], sums["unit"], sums["against"]) == ("distributed", "example", "sums")
    assert sums["epsilon_against_server"] == "20.0"


def test_the_file_takes_a_baseline_for_each_unit_and_names_a_missing_one(directory: Path) -> None:
    from fedsim.comparison.load import load_comparison
    from fedsim.experiment import ExperimentError

    source = directory / "compare.yaml"
    text = source.read_text()
    source.write_text(text.replace("baseline: plain", "baseline: {example: plain}"))
    assert load_comparison(source).baseline == {"example": "plain"}
    source.write_text(text.replace("baseline: plain", "baseline: {example: plian}"))
    with pytest.raises(ExperimentError, match="no variant 'plian'; did you mean 'plain'"):
        load_comparison(source)
    source.write_text(text.replace("baseline: plain", "baseline: {example: plain, client: dp}"))
    with pytest.raises(ExperimentError, match="no variant has unit client; leave it out"):
        load_comparison(source)
