"""docs/reference/keys.md is what the code says: nothing in it is typed by hand."""

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import Field

import fedsim
from fedsim.catalog import KEYS, catalog
from fedsim.cli import EXIT_CODES, cli
from fedsim.cli.registry import FILES
from fedsim.comparison.settings import ComparisonSettings
from fedsim.core.settings import Settings
from fedsim.experiment import Experiment, json_schema
from fedsim.experiment.tree import to_python
from fedsim.experiment.yaml_loader import parse_yaml
from fedsim.reference import EXAMPLES, example_of, reference
from fedsim.setting_tables import rows_of

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "keys.md"


@pytest.fixture(scope="module")
def generated() -> str:
    return reference()


@pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")
def test_the_page_is_what_the_generator_writes(generated: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == generated, (
        "docs/reference/keys.md is out of date: python -m fedsim.reference > docs/reference/keys.md"
    )


def test_it_has_every_option_and_exit_code(generated: str) -> None:
    rows = [line.strip("| ").split(" | ") for line in generated.splitlines()]
    found = {(name, row[0]) for row in rows if len(row) == 3 for name in row[2].split(", ")}
    for name, command in cli.commands.items():
        assert f"\n| `fedsim {name} [OPTIONS]" in generated
        for option in (one for one in command.params if one.param_type_name == "option"):
            texts = " ".join(text for place, text in found if place == f"`{name}`")
            assert all(f"`{opt}" in texts or f", {opt}" in texts for opt in option.opts)
    assert all(
        f"\n| {int(code)} | {meaning} |" in generated for code, meaning in EXIT_CODES.items()
    )


def test_it_has_every_key_of_every_section(generated: str) -> None:
    sections = json_schema()["$defs"]
    assert isinstance(sections, dict)
    names = {name for section in sections.values() for name in section.get("properties", {})}
    assert len(names) > 40
    assert [name for name in names if f".{name}` |" not in generated] == []


def test_every_key_has_a_meaning(generated: str) -> None:
    rows = [line.split(" | ") for line in generated.splitlines() if line.startswith("| `")]
    keys = [row for row in rows if len(row) == 5]
    assert len(keys) > 60
    assert [row[0] for row in keys if not row[3].strip(" |")] == []


def test_every_key_has_an_example_that_its_type_allows() -> None:
    rows = [*rows_of(Experiment), *rows_of(ComparisonSettings)]
    rows += [row for settings in FILES.values() for row in rows_of(settings)]
    for row in rows:
        example = example_of(row).replace("FINGERPRINT", "a" * 64)
        assert example, row.key
        value: Any = to_python(parse_yaml(f"value: {example}", "example", []))
        jsonschema.validate(value["value"], row.schema)
    assert set(EXAMPLES) - {row.key for row in rows} <= {
        "data.args." + name for name in ("path", "name", "subset", "revision", "features", "seed")
    } | {"federation.strategy.malicious_clients"}


def test_every_built_in_name_has_a_row(generated: str) -> None:
    rows = [line.split(" | ") for line in generated.splitlines() if line.count(" | ") == 2]
    found = {(key, name) for key, names, _ in rows for name in names.split(", ")}
    for kind, names in catalog().items():
        assert {(f"| `{KEYS[kind]}`", f"`{name}`") for name in names} <= found


def test_the_keys_of_files_are_those_of_a_run(generated: str, tmp_path: Path) -> None:
    experiment = {
        "name": "x",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 8},
        "privacy": None,
    }
    path = fedsim.run(experiment, out=tmp_path / "run").path
    for name in ("summary.json", "privacy.json", "environment.json"):
        (line,) = [line for line in generated.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(f"`{key}`" in line for key in json.loads((path / name).read_text()))
    (rounds,) = [line for line in generated.splitlines() if line.startswith("| `rounds.jsonl` |")]
    for key in ("failed[].reason", "withdrawn[].client", "shortened[].steps"):
        assert f"`{key}`" in rounds


class _Round(Settings):
    shape: Literal["round"] = Field(description="its shape")
    radius: float = Field(gt=0, le=2.5, description="in metres")
    holes: int = Field(default=1, ge=0, description="how many")


class _Square(Settings):
    shape: Literal["square"] = Field(description="its shape")
    holes: int = Field(default=1, ge=0, description="how many")


class _Box(Settings):
    lid: _Round | _Square = Field(discriminator="shape", description="what closes it")
    labels: dict[str, _Square] = Field(default={}, description="by name")
    stickers: list[_Square] | None = Field(default=None, description="or none")


def test_rows_name_ranges_defaults_choices_and_where_they_belong() -> None:
    rows = [(row.key, row.values, row.default, row.only_with) for row in rows_of(_Box)]
    assert rows == [
        ("lid", "mapping", "required", ()),
        ("lid.shape", "`round` or `square`", "required", ()),
        ("lid.radius", "number (> 0, ≤ 2.5)", "required", ("shape: round",)),
        ("lid.holes", "whole number (≥ 0)", "`1`", ()),
        ("labels", "mapping", "`{}`", ()),
        ("labels.NAME.shape", "`square`", "required", ()),
        ("labels.NAME.holes", "whole number (≥ 0)", "`1`", ()),
        ("stickers", "list of: mapping or null", "`null`", ()),
        ("stickers[].shape", "`square`", "required", ()),
        ("stickers[].holes", "whole number (≥ 0)", "`1`", ()),
    ]
