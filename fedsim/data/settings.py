"""`data:` of an experiment: the dataset, its test set and its partition among clients."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedsim.core.settings import Probability, Settings
from fedsim.data.partitions.settings import PartitionSettings
from fedsim.data.tables.settings import Columns, ColumnSettings


class FileDataset(Settings):
    """A table or archive on disk."""

    path: str | None = Field(
        default=None,
        description="file.npz, file.csv or file.parquet, relative to the experiment file; null "
        "with the partition scheme files, which names the files",
    )
    target: str = Field(description="column (csv, parquet) or array (npz) to predict")
    columns: Columns = Field(
        default={},
        description="how columns of a table become features: a mapping, or drop; the others are "
        "numbers as they are",
    )
    test: str | None = Field(
        default=None,
        description="table of the server's public test set, with the same columns; null: "
        "test_fraction of the rows",
    )
    decimal: Literal[".", ","] = Field(
        default=".", description="decimal mark of the numbers in a .csv file"
    )
    encoding: str = Field(
        default="utf-8", description="encoding of a .csv file, such as utf-8, cp1252 or utf-16"
    )

    def constants_of(self, column: str) -> ColumnSettings:
        """Return how a column becomes features; one that is not listed is numbers as they are."""
        listed = self.columns.get(column)
        return listed if isinstance(listed, ColumnSettings) else ColumnSettings()

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, name: str) -> str:
        try:
            "".encode(name)
        except LookupError as error:
            raise ValueError(
                f"{name!r} is no encoding of text; use utf-8, cp1252 or another of Python's"
            ) from error
        return name

    @model_validator(mode="after")
    def _rule(self) -> Self:
        own = self.columns.get(self.target)
        if own is None or (isinstance(own, ColumnSettings) and own.only_classes):
            return self
        raise ValueError(
            f"columns: {self.target!r} is the target, which is no feature; remove it, or list "
            f"its classes alone: {{{self.target}: {{classes: [...]}}}}"
        )


class ImageSettings(Settings):
    """`data.images`: layout and range of images; without it both follow from type and shape."""

    channels: Literal["first", "last", "none"] | None = Field(
        default=None,
        description="place of the channels in an array of images: first is kept, last is moved to "
        "the front, none adds the axis of a single channel; null: recognised for uint8",
    )
    scale: float | None = Field(
        default=None,
        ge=1e-9,
        le=1e9,
        description="public constant that features are divided by; null: 255 for images of uint8",
    )


class DataSettings(Settings):
    """`data:` in an experiment file."""

    dataset: str | FileDataset = Field(
        description="a built-in name, package.module:function, ./file.py:function, or "
        "{path: file.npz | file.csv | file.parquet, target: name, columns: ...}"
    )
    args: dict[str, Any] = Field(
        default={}, description="arguments of a built-in dataset, or of a dataset function"
    )
    features: Literal["numbers", "tokens"] = Field(
        default="numbers",
        description="numbers: float32; tokens: whole numbers from 0 as int64, for a model of your "
        "own that begins with an embedding",
    )
    images: ImageSettings | None = Field(
        default=None,
        description="layout and range of images in an .npz file or from a dataset function; null: "
        "as their type and shape say",
    )
    test_fraction: Probability | None = Field(
        default=None,
        description="fraction held out as the server's public test set, never on a client "
        "(default 0.2; not for datasets with a test set of their own)",
    )
    partition: PartitionSettings = Field(
        json_schema_extra={"discriminator": {"propertyName": "scheme"}}
    )

    @property
    def folder(self) -> str | None:
        """Folder with the files of a built-in dataset, as written; None where there is none."""
        is_built_in = isinstance(self.dataset, str) and ":" not in self.dataset
        path = self.args.get("path")
        return path if is_built_in and isinstance(path, str) else None
