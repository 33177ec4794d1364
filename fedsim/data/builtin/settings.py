"""Settings classes for `data.args` of the built-in datasets; importable without numpy."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES
from fedsim.core.settings import Settings

Size = Annotated[int, Field(ge=1, le=1_000_000)]
Spread = Annotated[float, Field(ge=0, le=1e6)]
EmnistSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


class NoArgs(Settings):
    """Settings `data.args` of a dataset without arguments."""


class TableArgs(Settings):
    """Settings `data.args` of a small table of scikit-learn."""

    scaled: bool = Field(
        default=True,
        description="whether features, and targets of a regression, are scaled to about [0, 1] by "
        "the ranges in the dataset's public description; false keeps the published numbers",
    )


class HeartDiseaseArgs(TableArgs):
    """Settings `data.args` of the built-in dataset `heart_disease`."""

    rows: Literal["complete", "all"] = Field(
        default="complete",
        description="complete: the 740 patients without gaps in ten columns, as in FLamby; all: "
        "920 patients and three columns more, with public constants in the gaps",
    )


class FolderArgs(Settings):
    """Settings `data.args` of a dataset in official files on disk."""

    path: str = Field(
        description="folder with the official files, packed or not, relative to the experiment file"
    )


class EmnistArgs(FolderArgs):
    """Settings `data.args` of the built-in dataset `emnist`."""

    split: EmnistSplit = Field(default="balanced", description="one of EMNIST's six datasets")


class Movielens100kArgs(Settings):
    """Settings `data.args` of the built-in dataset `movielens100k`."""

    path: str | None = Field(
        default=None,
        description="folder with the official file u.data, packed or not, relative to the "
        "experiment file; null: the table of the package recbole, if it is installed",
    )


class MedparArgs(Settings):
    """Settings `data.args` of the built-in dataset `medpar`."""

    target: Literal["los", "died"] = Field(
        default="los", description="length of the stay, for regression, or whether the patient died"
    )


class HuggingFaceArgs(Settings):
    """Settings `data.args` of the built-in dataset `huggingface`."""

    path: str | None = Field(
        default=None,
        description="folder with a dataset's files (parquet, csv, json, images), relative to the "
        "experiment file; read without network",
    )
    name: str | None = Field(
        default=None,
        max_length=200,
        description="name on the hub, read from the local cache or else downloaded once",
    )
    subset: str | None = Field(default=None, description="name of the subset, if there are several")
    revision: str | None = Field(
        default=None, description="commit of the dataset on the hub, so that it stays the same"
    )
    features: str | list[str] | None = Field(
        default=None,
        description="columns of features; null: all except the target and the partition's column",
    )
    target: str = Field(default="label", description="column to predict")
    train: str = Field(default="train", description="split that clients train on")
    test: str | None = Field(
        default="test",
        description="split that is the public test set; null holds out test_fraction",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.name is None):
            raise ValueError("needs one of path (a folder) and name (on the hub)")
        return self


class _SyntheticArgs(Settings):
    alpha: Spread = Field(default=1.0, description="how much the users' models differ")
    beta: Spread = Field(default=1.0, description="how much the users' features differ")
    iid: bool = Field(default=False, description="one distribution for all users; no alpha, beta")
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="seed of the draws; null: the experiment's seed"
    )


class SyntheticFedproxArgs(_SyntheticArgs):
    """Settings `data.args` of the built-in dataset `synthetic_fedprox`."""

    users: int = Field(default=30, ge=1, le=MAX_CLIENTS, description="number of users")
    dimension: Size = Field(default=60, description="number of features")
    classes: Size = Field(default=10, description="number of classes")


class SyntheticLogisticArgs(_SyntheticArgs):
    """Settings `data.args` of the built-in dataset `synthetic_logistic`."""

    users: int = Field(default=100, ge=1, le=MAX_CLIENTS, description="number of users")
    examples: int = Field(
        default=500, ge=1, le=MAX_EXAMPLES, description="number of examples of each user"
    )
    dimension: Size = Field(default=40, description="number of features")
    classes: Size = Field(default=10, description="number of classes")
    label_noise: float = Field(
        default=0.05, ge=0, le=1, description="share of labels that are drawn at random"
    )


class BlobsArgs(Settings):
    """Settings `data.args` of the built-in dataset `blobs`."""

    examples: int = Field(default=1000, ge=2, le=MAX_EXAMPLES, description="number of examples")
    classes: Size = Field(default=3, description="number of classes, of equal size")
    dimension: Size = Field(default=2, description="number of features")
    spread: Spread = Field(
        default=0.3, description="standard deviation around a class's centre, which is in [-1, 1]"
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="seed of the draws; null: the experiment's seed"
    )
