"""Settings of the section `data`: the dataset, its test set, and its partition among clients.

`LoadContext` has those that a loader of a built-in dataset gets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from fedsim.core.limits import MAX_CLASSES, MAX_CLIENTS, MAX_EXAMPLES
from fedsim.core.settings import MAY_BE_OBJECT, Branch, Probability, Settings
from fedsim.data.tables.settings import Columns, ColumnSettings

FlwrScheme = Literal[
    "ContinuousPartitioner",
    "DirichletPartitioner",
    "DistributionPartitioner",
    "ExponentialPartitioner",
    "GroupedNaturalIdPartitioner",
    "IidPartitioner",
    "InnerDirichletPartitioner",
    "LinearPartitioner",
    "NaturalIdPartitioner",
    "PathologicalPartitioner",
    "ShardPartitioner",
    "SizePartitioner",
    "SquarePartitioner",
]
"""Partitioners of flwr-datasets that divide rows; partitioners of columns are not supported."""

FLWR_SCHEMES: tuple[str, ...] = get_args(FlwrScheme)


MinExamples = Annotated[
    int, Field(ge=0, le=MAX_EXAMPLES, description="least number of examples of a client")
]


class _DrawnPartition(Settings):
    num_clients: int = Field(ge=1, le=MAX_CLIENTS, description="number of clients")
    min_examples: MinExamples = 1


class IidPartition(_DrawnPartition):
    """Settings of the partition `iid`: clients of equal size from the shuffled data."""

    scheme: Literal["iid"] = Field(description="name of the partition scheme")


class DirichletPartition(_DrawnPartition):
    """Settings of the partition `dirichlet`: a Dirichlet(alpha) draw divides each class."""

    scheme: Literal["dirichlet"] = Field(description="name of the partition scheme")
    alpha: float = Field(default=0.5, gt=0, description="a small alpha gives strong label skew")


class ShardsPartition(_DrawnPartition):
    """Settings of the partition `shards`: each client holds examples of a few classes only."""

    scheme: Literal["shards"] = Field(description="name of the partition scheme")
    classes_per_client: int = Field(
        default=2, ge=1, le=MAX_CLASSES, description="number of classes of each client"
    )


class QuantityPartition(_DrawnPartition):
    """Settings of the partition `quantity`: a Dirichlet(alpha) draw sets the sizes of clients.

    Each client gets `min_examples` first; the draw divides the other examples.
    """

    scheme: Literal["quantity"] = Field(description="name of the partition scheme")
    alpha: float = Field(default=0.5, gt=0, description="a small alpha gives strong size skew")


class _NaturalPartition(Settings):
    num_clients: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CLIENTS,
        description="number of clients, checked against the data; null takes it from the data",
    )
    min_examples: MinExamples = 1


class ColumnPartition(_NaturalPartition):
    """Settings of the partition `column`: a client for each value of a column like `hospital`."""

    scheme: Literal["column"] = Field(description="name of the partition scheme")
    column: str = Field(
        description="the column that names the client of each row; it is not a feature"
    )


class FilesPartition(_NaturalPartition):
    """Settings of the partition `files`: one client for each file, named after the file."""

    scheme: Literal["files"] = Field(description="name of the partition scheme")
    pattern: str = Field(
        description="the files, such as data/*.csv, relative to the experiment file; sorted by name"
    )


class FunctionPartition(_NaturalPartition):
    """Settings of a partition by your own function, which assigns training examples to clients."""

    scheme: str = Field(
        pattern=":",
        examples=["./file.py:function"],
        description="package.module:function or ./file.py:function",
    )
    args: dict[str, Any] = Field(default={}, description="arguments of the function")


class FlwrPartition(_NaturalPartition):
    """Settings of a partition by a partitioner of flwr-datasets (extra `datasets`)."""

    scheme: FlwrScheme = Field(
        examples=["DirichletPartitioner"], description="name of the partitioner's class"
    )
    args: dict[str, Any] = Field(
        default={},
        description="arguments of the class; num_partitions follows from num_clients and seed from "
        "the experiment unless they are given",
    )


def _branch_of(scheme: str) -> str:
    if scheme in FLWR_SCHEMES or scheme.endswith("Partitioner"):
        return "flwr"
    return "function" if ":" in scheme else scheme


NaturalPartition = ColumnPartition | FilesPartition | FunctionPartition | FlwrPartition
"""Partitions whose number of clients may come from the data."""

PartitionSettings = Annotated[
    Annotated[IidPartition, Tag("iid")]
    | Annotated[DirichletPartition, Tag("dirichlet")]
    | Annotated[ShardsPartition, Tag("shards")]
    | Annotated[QuantityPartition, Tag("quantity")]
    | Annotated[ColumnPartition, Tag("column")]
    | Annotated[FilesPartition, Tag("files")]
    | Annotated[FunctionPartition, Tag("function")]
    | Annotated[FlwrPartition, Tag("flwr")],
    Discriminator(Branch("scheme", _branch_of)),
]


FILE_GROUP = "file"
"""Name of the column in `Dataset.groups` that has the file name of each row."""

TARGET_NAMES = ("label", "target")
"""Names by which arguments of flwr-datasets' partitioners refer to the targets."""


def group_column(partition: PartitionSettings) -> str | None:
    """Return the name of the column that divides examples among clients; None if no column does.

    Such a column is not a feature.
    """
    if isinstance(partition, ColumnPartition):
        return partition.column
    named = partition.args.get("partition_by") if isinstance(partition, FlwrPartition) else None
    return named if isinstance(named, str) and named not in TARGET_NAMES else None


class FileDataset(Settings):
    """Settings `data.dataset` for examples in files: .csv or .parquet tables, or a .npz archive."""

    path: str | None = Field(
        default=None,
        description="file.npz, file.csv or file.parquet, relative to the experiment file; null "
        "with the partition scheme files, which names the files",
    )
    target: str = Field(description="column (csv, parquet) or array (npz) to predict")
    columns: Columns = Field(
        default={},
        description="how columns of a table become features: a mapping, or drop; other columns are "
        "used as numbers, unchanged",
    )
    constants: Literal["public", "from_rows"] = Field(
        default="public",
        description="where the constants of columns come from. public: knowledge that everyone "
        "may have; from_rows: a look at the rows, as in a draft of fedsim init --data, which no ε "
        "covers, and every run says so",
    )
    test: str | None = Field(
        default=None,
        description="table of the server's public test set, with the same columns; null holds out "
        "test_fraction of the rows",
    )
    decimal: Literal[".", ","] = Field(
        default=".", description="decimal mark of the numbers in a .csv file"
    )
    encoding: str = Field(
        default="utf-8", description="encoding of a .csv file, such as utf-8, cp1252 or utf-16"
    )

    def constants_of(self, column: str) -> ColumnSettings:
        """Return the settings that `columns` has for a column, or else the default settings."""
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
        target = self.columns.get(self.target)
        if target is None or (isinstance(target, ColumnSettings) and target.only_classes):
            return self
        raise ValueError(
            f"columns: {self.target!r} is the target, which is not a feature; remove it, or "
            f"list only its classes: {{{self.target}: {{classes: [...]}}}}, or a cut: "
            f"{{{self.target}: {{above: 0}}}}"
        )


class ImageSettings(Settings):
    """Settings `data.images`: layout and range of images."""

    channels: Literal["first", "last", "none"] | None = Field(
        default=None,
        description="place of the channels in an array of images: first is kept, last is moved to "
        "the front, none adds the axis of a single channel; null: recognised by shape for uint8",
    )
    scale: float | None = Field(
        default=None,
        ge=1e-9,
        le=1e9,
        description="public constant by which features are divided; null: 255 for images of uint8",
    )


class DataSettings(Settings):
    """Settings of the section `data` of an experiment file: dataset, test set and partition."""

    dataset: Annotated[str | FileDataset, MAY_BE_OBJECT] = Field(
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
        description="layout and range of images in an .npz file or from a dataset function; null "
        "takes both from their type and shape",
    )
    test_fraction: Probability | None = Field(
        default=None,
        description="fraction held out as the server's public test set, never on a client "
        "(default 0.2; not for datasets that come with a test set)",
    )
    partition: PartitionSettings = Field(
        json_schema_extra={"discriminator": {"propertyName": "scheme"}}
    )

    @property
    def folder(self) -> str | None:
        """Folder of a built-in dataset, as in the experiment file; None if no folder is set."""
        is_built_in = isinstance(self.dataset, str) and ":" not in self.dataset
        path = self.args.get("path")
        return path if is_built_in and isinstance(path, str) else None

    def features_mistake(self, *, has_tokens: bool) -> str | None:
        """Return why `features` does not fit the built-in dataset; None if it does.

        Args:
            has_tokens: whether the dataset has tokens.
        """
        if has_tokens == (self.features == "tokens"):
            return None
        if not has_tokens:
            return f"{self.dataset} has numbers, no tokens; remove features"
        return (
            f"{self.dataset} has tokens, for a model that begins with an embedding; write "
            "features: tokens"
        )


@dataclass(frozen=True)
class LoadContext:
    """The parts of an experiment that the loader of a built-in dataset needs.

    Attributes:
        seed: the experiment's seed.
        base: the directory to which relative paths refer.
        images: the setting `data.images`.
        group: column of the data that divides the examples among clients; None for other
            partitions.
    """

    seed: int
    base: Path
    images: ImageSettings | None = None
    group: str | None = None

    def folder(self, path: str) -> Path:
        """Return the full path of a folder that the experiment names relative to `base`."""
        return self.base / Path(path).expanduser()
