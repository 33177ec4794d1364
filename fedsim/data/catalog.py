"""Catalogue of the built-in datasets, with their `data.args`, and of partition schemes.

The module can be imported without heavy packages, such as numpy.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES
from fedsim.core.settings import Settings

Size = Annotated[int, Field(ge=1, le=1_000_000)]
Spread = Annotated[float, Field(ge=0, le=1e6)]
_HUB_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"  # others are local files
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
        description="OWNER/NAME on the hub, read from the local cache or else downloaded once",
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
        if self.name is not None and re.fullmatch(_HUB_NAME, self.name) is None:
            raise ValueError(
                f"name must be OWNER/NAME as on the hub, such as ylecun/mnist, got {self.name!r}; "
                "for a folder use path"
            )
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


@dataclass(frozen=True)
class DatasetEntry:
    """Catalogue entry of a built-in dataset.

    Attributes:
        description: the dataset's line in `fedsim list`.
        args: the settings class for `data.args` of the dataset.
        shape: shape of one example; None if it depends on the settings.
        groups: columns by which `partition: {scheme: column}` may divide the dataset; None if they
            depend on the data.
        tokens: whether features are tokens, so that `data.features` must be `tokens`.
    """

    description: str
    args: type[Settings]
    shape: tuple[int, ...] | None = None
    groups: tuple[str, ...] | None = ()
    tokens: bool = False


DATASETS = {
    "digits": DatasetEntry(
        "1,797 handwritten digits, 8 x 8 grey pixels, 10 classes (scikit-learn, offline)",
        NoArgs,
        (1, 8, 8),
    ),
    "iris": DatasetEntry(
        "150 flowers, 4 lengths, 3 classes (scikit-learn, offline)", TableArgs, (4,)
    ),
    "wine": DatasetEntry(
        "178 wines, 13 measurements, 3 classes (scikit-learn, offline)", TableArgs, (13,)
    ),
    "breast_cancer": DatasetEntry(
        "569 tumours, 30 measurements, 2 classes (scikit-learn, offline)", TableArgs, (30,)
    ),
    "diabetes": DatasetEntry(
        "442 patients, 10 measurements, regression (scikit-learn, offline)", TableArgs, (10,)
    ),
    "linnerud": DatasetEntry(
        "20 athletes, 3 exercises, regression of 3 targets (scikit-learn, offline)",
        TableArgs,
        (3,),
    ),
    "heart_disease": DatasetEntry(
        "740 or 920 patients of four hospitals, 14 to 22 features, 2 classes (extra data, offline)",
        HeartDiseaseArgs,
        groups=("hospital",),
    ),
    "mnist": DatasetEntry(
        "70,000 handwritten digits, 28 x 28, 10 classes (official files in args.path)",
        FolderArgs,
        (1, 28, 28),
    ),
    "mnist5k": DatasetEntry(
        "5,000 handwritten digits of MNIST, 28 x 28, 10 classes (extra data)", NoArgs, (1, 28, 28)
    ),
    "fashion_mnist": DatasetEntry(
        "70,000 articles of clothing, 28 x 28, 10 classes (official files in args.path)",
        FolderArgs,
        (1, 28, 28),
    ),
    "emnist": DatasetEntry(
        "handwritten letters and digits, 28 x 28, 10 to 62 classes, with writers (official files "
        "in args.path)",
        EmnistArgs,
        (1, 28, 28),
        ("writer",),
    ),
    "cifar10": DatasetEntry(
        "60,000 colour photographs, 32 x 32, 10 classes (official files in args.path)",
        FolderArgs,
        (3, 32, 32),
    ),
    "schools": DatasetEntry(
        "4,059 pupils of 65 schools in London, regression of an exam score (extra data)",
        NoArgs,
        (9,),
        ("school",),
    ),
    "chem97": DatasetEntry(
        "31,022 pupils of 2,410 schools, regression of chemistry points (extra data)",
        NoArgs,
        (4,),
        ("school", "lea"),
    ),
    "medpar": DatasetEntry(
        "1,495 patients of 54 hospitals in Arizona, length of stay or deaths (extra data)",
        MedparArgs,
        (6,),
        ("hospital",),
    ),
    "movielens_small": DatasetEntry(
        "100,004 ratings of 9,066 films by 671 users (extra data; not for commercial use)",
        NoArgs,
        (2,),
        ("user",),
        tokens=True,
    ),
    "movielens100k": DatasetEntry(
        "100,000 ratings of 1,682 films by 943 users (official file in args.path, or recbole; not "
        "for commercial use)",
        Movielens100kArgs,
        (2,),
        ("user",),
        tokens=True,
    ),
    "huggingface": DatasetEntry(
        "a dataset of Hugging Face, by flwr-datasets (extra datasets)",
        HuggingFaceArgs,
        groups=None,
    ),
    "synthetic_fedprox": DatasetEntry(
        "Synthetic(alpha, beta) of FedProx: 30 users with models and features of their own",
        SyntheticFedproxArgs,
        groups=("user",),
    ),
    "synthetic_logistic": DatasetEntry(
        "Logistic(alpha, beta) of DP-SCAFFOLD: 100 users of equal size",
        SyntheticLogisticArgs,
        groups=("user",),
    ),
    "blobs": DatasetEntry("Gaussian classes around random centres", BlobsArgs),
}


PARTITIONS = {
    "iid": "clients of equal size from the shuffled data",
    "dirichlet": "label skew: classes divided by Dirichlet(alpha)",
    "shards": "label skew: classes_per_client classes on each client",
    "quantity": "size skew: client sizes by Dirichlet(alpha) above min_examples",
    "column": "a client for each value of a column, such as a hospital",
    "files": "a client for each file of a pattern, such as data/*.csv",
}
