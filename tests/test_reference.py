"""docs/reference/keys.md is what the code says: nothing in it is typed by hand."""

from pathlib import Path
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import Field

from fedsim.catalog import KEYS, catalog
from fedsim.cli import EXIT_CODES, cli
from fedsim.cli.registry import FILES
from fedsim.comparison.settings import ComparisonSettings
from fedsim.core.settings import Settings
from fedsim.experiment import Experiment, json_schema
from fedsim.experiment.yaml_loader import parse_yaml, to_python
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


def test_it_has_every_command_and_exit_code(generated: str) -> None:
    assert all(f"\n| `fedsim {name} [OPTIONS]" in generated for name in cli.commands)
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
        Draft202012Validator(row.schema).validate(value["value"])  # checking each schema takes 40 s
    assert set(EXAMPLES) - {row.key for row in rows} <= {
        "data.args." + name for name in ("path", "name", "subset", "revision", "features", "seed")
    } | {"federation.strategy.malicious_clients"}


def test_every_built_in_name_is_in_a_row_of_its_key(generated: str) -> None:
    for kind, names in catalog().items():
        key = KEYS[kind]
        rows = [line for line in generated.splitlines() if line.startswith(f"| `{key}` |")]
        text = "\n".join(row.split(" | ", 1)[1] for row in rows)
        missing = [name for name in names if f"`{name}`" not in text]
        assert [name for name in missing if f"\n| `{key}[].{name}` |" not in generated] == []


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
