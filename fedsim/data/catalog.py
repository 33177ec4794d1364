"""Catalogue of the built-in datasets and partition schemes; importable without heavy packages."""

from dataclasses import dataclass

from fedsim.core.settings import Settings
from fedsim.data.builtin.settings import (
    BlobsArgs,
    EmnistArgs,
    FolderArgs,
    HuggingFaceArgs,
    NoArgs,
    SyntheticFedproxArgs,
    SyntheticLogisticArgs,
    TableArgs,
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
    """

    description: str
    args: type[Settings]
    shape: tuple[int, ...] | None = None
    groups: tuple[str, ...] | None = ()


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
    "mnist": DatasetEntry(
        "70,000 handwritten digits, 28 x 28, 10 classes (official files in args.path)",
        FolderArgs,
        (1, 28, 28),
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
