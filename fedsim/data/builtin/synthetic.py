"""Synthetic datasets: examples of users who differ in model and features, and Gaussian classes.

Each user's examples are drawn from a separate random stream, so they do not depend on other users.

References:
    Synthetic(α, β): Li et al. 2020, FedProx (arXiv 1812.06127), section 5.1. As in the published
        generator, α and β are standard deviations and user k has 50 + LogNormal(4, 2) examples.
    Logistic(α, β): Noble et al. 2022, DP-SCAFFOLD (arXiv 2111.09278), section 5. As in the
        published generator, α and β are variances.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import machine_bytes
from fedsim.core.streams import Purpose, stream
from fedsim.data.catalog import BlobsArgs, SyntheticFedproxArgs, SyntheticLogisticArgs
from fedsim.data.examples import DataError, Dataset, Examples
from fedsim.data.settings import LoadContext

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]

USER = "user"
"""Column by which `partition: {scheme: column}` assigns each user's examples to one client."""

_DECAY = 1.2  # the variance of feature j is j to the power of minus this
_LEAST_EXAMPLES = 50


def load_synthetic_fedprox(args: SyntheticFedproxArgs, context: LoadContext) -> Dataset:
    """Return the dataset Synthetic(α, β) of FedProx; its column `user` names each example's user.

    User k draws features x ~ N(v_k, diag(j^-1.2)), j = 1, 2, ..., and labels them by
    argmax(W_k x + b_k). The entries of W_k and b_k are N(u_k, 1) with u_k ~ N(0, α²), those of v_k
    are N(B_k, 1) with B_k ~ N(0, β²). With `iid` all users share W and b ~ N(0, 1), and v is 0.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the examples do not fit into memory.
    """
    seed = context.seed if args.seed is None else args.seed
    common = stream(seed, Purpose.DATASET)
    sizes = _LEAST_EXAMPLES + common.lognormal(4, 2, args.users).astype(np.int64)
    _check_memory(int(sizes.sum()), args.dimension, args.classes)
    shape = (args.dimension, args.classes)
    shared = common.standard_normal(shape), common.standard_normal(args.classes)

    def draw(user: int) -> Labelled:
        rng = stream(seed, Purpose.DATASET, client=user + 1)
        if args.iid:
            weights, bias, centre = *shared, np.zeros(args.dimension)
        else:
            model_mean = args.alpha * rng.standard_normal()
            feature_mean = args.beta * rng.standard_normal()
            weights = model_mean + rng.standard_normal(shape)
            bias = model_mean + rng.standard_normal(args.classes)
            centre = feature_mean + rng.standard_normal(args.dimension)
        return _labelled(rng, int(sizes[user]), weights, bias, centre)

    return _of_users((draw(user) for user in range(args.users)), args.classes)


def load_synthetic_logistic(args: SyntheticLogisticArgs, context: LoadContext) -> Dataset:
    """Return the dataset Logistic(α, β) of DP-SCAFFOLD; its column `user` names the users.

    User k draws features with mean v_k and labels them by a linear model W_k, b_k, as in
    `load_synthetic_fedprox`. But every entry has a separate mean: entries of W_k and b_k are
    N(0, α + 1) and those of v_k are N(0, β + 1). A share `label_noise` of the labels is drawn at
    random. With `iid` all users share W, b and v ~ N(0, 1).

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the examples do not fit into memory.
    """
    seed = context.seed if args.seed is None else args.seed
    _check_memory(args.users * args.examples, args.dimension, args.classes)
    shape = (args.dimension, args.classes)

    def parameters(rng: np.random.Generator) -> tuple[NDArray[np.float64], ...]:
        return tuple(rng.standard_normal(size) for size in (shape, args.classes, args.dimension))

    shared = parameters(stream(seed, Purpose.DATASET))

    def draw(user: int) -> Labelled:
        rng = stream(seed, Purpose.DATASET, client=user + 1)
        weights, bias, centre = shared
        if not args.iid:
            means, noise = parameters(rng), parameters(rng)
            deviations = np.sqrt([args.alpha, args.alpha, args.beta])
            weights, bias, centre = (
                d * m + o for d, m, o in zip(deviations, means, noise, strict=True)
            )
        features, classes = _labelled(rng, args.examples, weights, bias, centre)
        is_noise = rng.random(args.examples) < args.label_noise
        others = rng.integers(0, args.classes, args.examples)
        return features, np.where(is_noise, others, classes)

    return _of_users((draw(user) for user in range(args.users)), args.classes)


def load_blobs(args: BlobsArgs, context: LoadContext) -> Dataset:
    """Return a dataset of Gaussian classes, whose centres are uniform in [-1, 1] in every feature.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the examples do not fit into memory.
    """
    seed = context.seed if args.seed is None else args.seed
    _check_memory(args.examples, args.dimension, args.classes)
    rng = stream(seed, Purpose.DATASET)
    centres = rng.uniform(-1, 1, (args.classes, args.dimension))
    classes = np.arange(args.examples, dtype=np.int64) % args.classes
    noise = rng.standard_normal((args.examples, args.dimension))
    features = (centres[classes] + args.spread * noise).astype(np.float32)
    return Dataset(Examples(features, classes))


def _labelled(
    rng: np.random.Generator,
    size: int,
    weights: NDArray[np.float64],
    bias: NDArray[np.float64],
    centre: NDArray[np.float64],
) -> Labelled:
    """Return features around `centre`, (size, dimension), and the class of the largest score."""
    deviation = np.arange(1, len(centre) + 1) ** (-_DECAY / 2)
    features = centre + deviation * rng.standard_normal((size, len(centre)))
    return features.astype(np.float32), (features @ weights + bias).argmax(axis=1)


def _of_users(parts: Iterable[Labelled], num_classes: int) -> Dataset:
    features, classes = zip(*parts, strict=True)
    digits = len(str(len(classes) - 1))  # names in the order of the numbers
    users = [f"{user:0{digits}d}" for user, labels in enumerate(classes) for _ in labels]
    examples = Examples(np.concatenate(features), np.concatenate(classes).astype(np.int64))
    names = tuple(map(str, range(num_classes)))  # also of classes that no user has
    return Dataset(examples, class_names=names, groups={USER: users})


def _check_memory(examples: int, dimension: int, classes: int) -> None:
    # Features in float32 and once in float64; weights of all users, one user, and their means.
    needed = 12 * examples * dimension + 24 * dimension * classes
    if needed > machine_bytes():
        raise DataError(
            f"data.args: {examples:,} examples of {dimension:,} features in {classes:,} classes "
            f"need {needed / 2**30:,.0f} GiB, and this machine has "
            f"{machine_bytes() / 2**30:,.0f} GiB; lower them"
        )
