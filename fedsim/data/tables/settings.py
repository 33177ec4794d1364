"""Settings of `data.dataset.columns`: public constants that turn a column into features."""

from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from fedsim.core.settings import Settings

Cell = str | bool | Annotated[int, Field(ge=-(2**53), le=2**53)] | float
Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]


def _classes(value: Any) -> "list[Cell] | dict[str, list[Cell]]":
    """Return two classes or more: a list of cells, or lists of cells by the name of a class."""
    groups = value.values() if isinstance(value, dict) else [value]
    if not (
        (isinstance(value, list) or (isinstance(value, dict) and all(map(_is_text, value))))
        and all(isinstance(cells, list) and cells and all(map(_is_cell, cells)) for cells in groups)
    ):
        raise ValueError(
            "must be a list of cells, such as [F, M], or lists of cells by the name of a class, "
            "such as {healthy: [0], ill: [1, 2, 3, 4]}"
        )
    if len(value) < 2:
        raise ValueError(f"must have at least 2 classes, got {len(value)}")
    return value


def _is_text(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _is_cell(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= 2**53
    return isinstance(value, str | bool) or (isinstance(value, float) and isfinite(value))


_CELLS: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, {"type": "boolean"}, {"type": "number"}]},
    "minItems": 1,
}
Classes = Annotated[
    list[Cell] | dict[str, list[Cell]],
    PlainValidator(_classes),
    WithJsonSchema(
        {
            "anyOf": [
                {**_CELLS, "minItems": 2},
                {"type": "object", "additionalProperties": _CELLS, "minProperties": 2},
            ]
        }
    ),
]


class ColumnSettings(Settings):
    """Settings of one table column, which say how its cells become features."""

    limit: ClassVar[float | None] = None  # some data mark missing cells by numbers such as -3.4e38

    range: Bounds | None = Field(
        default=None,
        description="[low, high] in units of the column: numbers are clipped to this range and "
        "scaled to [0, 1]; public knowledge, not the extremes of the data",
    )
    log: bool = Field(
        default=False, description="sign(x) log(1 + |x|), for numbers over orders of magnitude"
    )
    classes: Classes | None = Field(
        default=None,
        description="categories of the column: one feature, 0 or 1, for each; for the target: the "
        "names of its classes, in the order of their numbers. A mapping groups cells: {healthy: "
        "[0], ill: [1, 2, 3, 4]}",
    )
    above: float | None = Field(
        default=None,
        description="a cut: numbers up to this value are one class, larger ones the other; for the "
        "target, or one feature, 0 or 1, for each",
    )
    date: str | None = Field(
        default=None,
        description="iso, or a format such as %d.%m.%Y: dates become years with a fraction, "
        "2024.5, and so do the bounds of range",
    )
    fill: Cell | None = Field(
        default=None,
        description="the value of missing cells: a number, or one of classes; null refuses missing "
        "cells",
    )
    missing: list[Cell] = Field(
        default=[],
        description="further cells that mean a missing value, such as -9; empty cells and NA, N/A, "
        "NaN, null, None, ? always do",
    )
    other: Cell | None = Field(
        default=None,
        description="the class of every cell that is not in classes; null refuses such cells",
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of their numbers; None for a column of numbers."""
        if self.above is not None:
            cut = as_text(self.above)
            return f"up to {cut}", f"above {cut}"
        return None if self.classes is None else tuple(map(as_text, self.classes))

    @property
    def only_classes(self) -> bool:
        """Whether the settings only define classes; a target column may have no other settings."""
        others = self.model_dump(exclude={"classes", "above"}).values()
        return self.class_names is not None and not any(others)

    def feature_names(self, column: str) -> tuple[str, ...]:
        """Return the names of a column's features: its name, or `sex=F`, `sex=M` for classes."""
        names = self.class_names
        return (column,) if names is None else tuple(f"{column}={name}" for name in names)

    @model_validator(mode="after")
    def _rule(self) -> Self:
        if self.classes is not None:
            self._check_classes([*map(as_text, self.classes)])
            return self
        if self.other is not None:
            raise ValueError("other is one of classes; add classes, or remove other")
        if isinstance(self.fill, str | bool):
            raise ValueError(
                f"fill must be a number for a column of numbers, got {as_text(self.fill)!r}; for "
                "categories, add classes"
            )
        for key in ("range", "log"):
            if self.above is not None and getattr(self, key):
                raise ValueError(f"above and {key} exclude each other; remove one of them")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range must be [low, high] with low < high, got {self.range}")
        if self.date is not None and self.log:
            raise ValueError("log and date exclude each other; remove log")
        if self.date is not None and self.date != "iso" and "%" not in self.date:
            raise ValueError(f"date must be iso or a format such as %d.%m.%Y, got {self.date!r}")
        return self

    def _check_classes(self, names: list[str]) -> None:
        for key in ("range", "log", "date", "above"):
            if getattr(self, key) is not ColumnSettings.model_fields[key].default:
                raise ValueError(f"classes and {key} exclude each other; remove one of them")
        groups = self.classes.values() if isinstance(self.classes, dict) else [self.classes or []]
        cells = [as_text(cell) for group in groups for cell in group]
        repeated = next((cell for cell in cells if cells.count(cell) > 1), None)
        if repeated is not None:
            raise ValueError(f"classes has {repeated!r} twice; remove one")
        for key in ("fill", "other"):
            value = getattr(self, key)
            if value is not None and as_text(value) not in names:
                raise ValueError(
                    f"{key} must be one of classes, got {as_text(value)!r}; add it to classes"
                )


Columns = dict[str, Literal["drop"] | ColumnSettings]
"""Settings of columns by name; `drop` excludes a column from the features."""


def as_text(value: object) -> str:
    """Return a value from YAML or a typed table as the text of a .csv cell, such as true or 3."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
