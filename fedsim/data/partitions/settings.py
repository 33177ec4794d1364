"""`data.partition` of an experiment: which client holds which examples."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from fedsim.core.limits import MAX_CLASSES, MAX_CLIENTS, MAX_EXAMPLES
from fedsim.core.settings import Branch, Settings

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
"""Partitioners of flwr-datasets that divide rows; those that divide columns are no federation."""

FLWR_SCHEMES: tuple[str, ...] = get_args(FlwrScheme)


MinExamples = Annotated[
    int, Field(ge=0, le=MAX_EXAMPLES, description="least number of examples of a client")
]


class _DrawnPartition(Settings):
    num_clients: int = Field(ge=1, le=MAX_CLIENTS, description="number of clients")
    min_examples: MinExamples = 1


class IidPartition(_DrawnPartition):
    """Clients of equal size from the shuffled data."""

    scheme: Literal["iid"] = Field(description="name of the partition scheme")


class DirichletPartition(_DrawnPartition):
    """Label skew: each class is divided by a Dirichlet(alpha) draw; small alpha, more skew."""

    scheme: Literal["dirichlet"] = Field(description="name of the partition scheme")
    alpha: float = Field(default=0.5, gt=0, description="small: strong label skew")


class ShardsPartition(_DrawnPartition):
    """Pathological label skew: each client holds examples of a few classes only."""

    scheme: Literal["shards"] = Field(description="name of the partition scheme")
    classes_per_client: int = Field(
        default=2, ge=1, le=MAX_CLASSES, description="number of classes of each client"
    )


class QuantityPartition(_DrawnPartition):
    """Size skew: min_examples for every client, the rest by a Dirichlet(alpha) draw."""

    scheme: Literal["quantity"] = Field(description="name of the partition scheme")
    alpha: float = Field(default=0.5, gt=0, description="small: strong size skew")


class _NaturalPartition(Settings):
    num_clients: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CLIENTS,
        description="number of clients, checked against the data; null: as the data have it",
    )
    min_examples: MinExamples = 1


class ColumnPartition(_NaturalPartition):
    """A client for each value of a column, such as a hospital."""

    scheme: Literal["column"] = Field(description="name of the partition scheme")
    column: str = Field(description="the column that names the client of each row; no feature")


class FilesPartition(_NaturalPartition):
    """A client for each file, named after it."""

    scheme: Literal["files"] = Field(description="name of the partition scheme")
    pattern: str = Field(
        description="the files, such as data/*.csv, relative to the experiment file; sorted by name"
    )


class FunctionPartition(_NaturalPartition):
    """A function of your own that returns the client of each training example."""

    scheme: str = Field(
        pattern=":",
        examples=["./file.py:function"],
        description="package.module:function or ./file.py:function",
    )
    args: dict[str, Any] = Field(default={}, description="passed to the function")


class FlwrPartition(_NaturalPartition):
    """A partitioner of flwr-datasets (extra `datasets`), with its own arguments."""

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
"""Partitions whose number of clients the data may decide."""

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
"""Name of the column of `Dataset.groups` that names the file of each row."""

TARGET_NAMES = ("label", "target")
"""Names of the targets in arguments of partitioners of flwr-datasets."""


def group_column(partition: PartitionSettings) -> str | None:
    """Return the column of a table that a partition reads and that is no feature, or None."""
    if isinstance(partition, ColumnPartition):
        return partition.column
    named = partition.args.get("partition_by") if isinstance(partition, FlwrPartition) else None
    return named if isinstance(named, str) and named not in TARGET_NAMES else None
