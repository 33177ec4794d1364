"""Catalogue of the built-in datasets and partition schemes; importable without heavy packages."""

from dataclasses import dataclass

from fedsim.core.settings import Settings
from fedsim.data.builtin.settings import (
    BlobsArgs,
    EmnistArgs,
    FolderArgs,
    HeartDiseaseArgs,
    HuggingFaceArgs,
    MedparArgs,
    Movielens100kArgs,
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


def token_mistake(name: str, features: str) -> str | None:
    """Return why the setting `data.features` does not fit a built-in dataset; None if it does.

    Args:
        name: the dataset.
        features: the setting, `numbers` or `tokens`.
    """
    if DATASETS[name].tokens == (features == "tokens"):
        return None
    if features == "tokens":
        return f"{name} has numbers, no tokens; remove features"
    return f"{name} has tokens, for a model that begins with an embedding; write features: tokens"


PARTITIONS = {
    "iid": "clients of equal size from the shuffled data",
    "dirichlet": "label skew: classes divided by Dirichlet(alpha)",
    "shards": "label skew: classes_per_client classes on each client",
    "quantity": "size skew: client sizes by Dirichlet(alpha) above min_examples",
    "column": "a client for each value of a column, such as a hospital",
    "files": "a client for each file of a pattern, such as data/*.csv",
}
