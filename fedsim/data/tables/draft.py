"""Drafts of column settings, made from the rows of a table, for `fedsim init --data`.

A draft depends on private rows and adds no noise, so no ε covers a draft; it is only a starting
point. Before an ε is published, public knowledge must replace every constant of the draft.
"""

import json
import re
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, expm1, floor, log1p
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.data.tables.settings import ColumnSettings, as_text
from fedsim.data.tables.summary import MAX_CATEGORIES, MAX_DISTINCT, ColumnSummary

_MAX_CODES = 6  # most different whole numbers that are taken for codes
_MAX_CHARS = 40  # longest category; longer cells are free text
_FEW_ROWS = 20  # in fewer rows different values tell nothing about an identifier
_SKEW = 10.0  # largest ratio of the maximum to the mean that needs no logarithm
_UNKNOWN = "unknown"
_CODE_BOOK = "which ones does its code book have?"
_SENTINELS = (-9.0, -99.0, -999.0, -9999.0)
_ID_NAME = re.compile(r"(?:.*[_ -])?(?:id|uuid)", re.IGNORECASE)  # also where values repeat
_NUMBER_NAME = re.compile(r"(?:.*[_ -])?(?:index|nr|no|number|key)", re.IGNORECASE)


@dataclass(frozen=True)
class ColumnDraft:
    """The drafted settings of a table column, with comments for the user.

    Attributes:
        name: name of the column.
        settings: the drafted settings; "drop" if the column should not be a feature; None for the
            target of a regression, which needs no settings.
        reason: what the column seems to hold, such as "dates", without any value of its rows.
        check: question about the settings that the user should answer from public knowledge; "" if
            there is none.
    """

    name: str
    settings: ColumnSettings | Literal["drop"] | None
    reason: str
    check: str = ""

    @property
    def value(self) -> str:
        """The drafted settings as one line of YAML, such as `{range: [0, 100]}`."""
        if not isinstance(self.settings, ColumnSettings):
            return self.settings or ""
        return flow_text(self.settings.model_dump(exclude_defaults=True))

    @property
    def line(self) -> str:
        """The column's line of YAML below `data.dataset.columns`, without the comment."""
        return f"{flow_text(self.name)}: {self.value}"

    @property
    def comment(self) -> str:
        """The YAML comment that follows `line`: the reason and the question."""
        return f"# {self.reason}{f'; {self.check}' if self.check else ''}"


_PLAIN = re.compile(r"[A-Za-z][\w-]*(?: [\w-]+)*", re.ASCII)
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


def flow_text(value: object) -> str:
    """Return a value as one line of YAML; text that a parser could misread is in quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{flow_text(k)}: {flow_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow_text, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, float):
        return as_text(value)
    text = json.dumps(value, ensure_ascii=False)
    return "".join(mark if mark.isprintable() else f"\\U{ord(mark):08x}" for mark in text)


def draft_column(name: str, summary: ColumnSummary) -> ColumnDraft:
    """Return the drafted settings of a column that is a feature.

    | cells                                          | become                                  |
    |------------------------------------------------|-----------------------------------------|
    | all missing, or all equal                      | drop                                    |
    | whole numbers or texts that identify rows      | drop: an identifier                     |
    | dates of one format                            | years, with a range                     |
    | whole numbers, 3 to 6 different ones           | classes                                 |
    | other numbers, also with a few texts           | a range, with log if they are skewed    |
    | up to 20 different texts of up to 40 letters   | classes                                 |
    | other texts                                    | drop: free text, or too many categories |

    Args:
        name: name of the column.
        summary: counts of the column's cells.
    """
    known = summary.rows - summary.gaps
    if not known:
        return ColumnDraft(name, "drop", "every cell is missing")
    if len({*summary.cells, *([_UNKNOWN] if summary.gaps else [])}) == 1:
        return ColumnDraft(name, "drop", "every cell is the same")
    form = summary.date_format
    if form is not None:
        return _draft_dates(name, summary, form)
    if summary.is_number:
        return _draft_numbers(name, summary)
    hardly_repeated = len(summary.texts) >= min(0.9 * known, MAX_DISTINCT)
    if known >= _FEW_ROWS and hardly_repeated:
        has_spaces = any(" " in cell for cell in islice(summary.texts, 100))
        return ColumnDraft(name, "drop", "free text" if has_spaces else "an identifier")
    cells = summary.cells
    if max(map(len, cells)) > _MAX_CHARS:
        return ColumnDraft(name, "drop", "free text")
    if len(cells) > MAX_CATEGORIES or len(summary.numerals) > _MAX_CODES:
        check = "which few of them matter? {classes: [...], other: ...}"
        return ColumnDraft(name, "drop", "text with many different values", check)
    return _draft_classes(name, summary, "categories", _CODE_BOOK)


def draft_target(name: str, summary: ColumnSummary) -> ColumnDraft:
    """Return the draft for the target column: its classes, or no settings for a regression."""
    cells, values = summary.cells, summary.values
    is_whole = bool((values == np.floor(values)).all())
    if 2 <= len(cells) <= MAX_CATEGORIES and (is_whole or not summary.is_number):
        settings = ColumnSettings(classes=[_as_yaml(cell) for cell in cells])
        return ColumnDraft(name, settings, "classes", _CODE_BOOK)
    return ColumnDraft(name, None, "numbers" if summary.is_number else "text")


def _draft_dates(name: str, summary: ColumnSummary, form: str) -> ColumnDraft:
    years = summary.years(form)
    low, high = floor(years.min()), floor(years.max()) + 1
    fill = {"fill": (low + high) / 2} if summary.gaps else {}
    settings = ColumnSettings.model_validate({"date": form, "range": [low, high], **fill})
    order = " day or month first?" if "/" in form else ""
    return ColumnDraft(name, settings, "dates", f"which years are possible?{order}")


def _draft_numbers(name: str, summary: ColumnSummary) -> ColumnDraft:
    values, strays = summary.values, sorted(summary.texts)
    missing: list[Any] = [_as_yaml(cell) for cell in strays]
    for code in _SENTINELS:
        rest = values[values != code]
        if rest.size and rest.size < values.size and rest.min() >= 0:
            values, missing = rest, [*missing, int(code)]
    distinct = np.unique(values)
    is_whole = bool((distinct == np.floor(distinct)).all())
    gaps = summary.gaps or missing
    if is_whole and _is_identifier(name, distinct, summary.rows):
        return ColumnDraft(name, "drop", "an identifier")
    codes = is_whole and len(distinct) <= _MAX_CODES and not missing
    if codes and (gaps or len(distinct) > 2):
        low, high = distinct[0], distinct[-1]
        amount = f"codes or amounts? amounts: {{range: [{low:g}, {max(high, low + 1):g}]}}"
        return _draft_classes(name, summary, "a few whole numbers", amount)
    if len(distinct) < 2:
        return ColumnDraft(name, "drop", "every cell is the same, or missing")
    low, high = float(values.min()), float(values.max())
    log = low >= 0 and high > _SKEW * float(values.mean())
    bounds = [low, high] if len(distinct) == 2 else _rounded_outward(low, high)
    if log:
        bounds[0] = 0.0
    settings: dict[str, Any] = {"range": bounds, "log": log, "missing": missing}
    if gaps:
        settings["fill"] = _middle(*bounds, log=log)
    kind = "whole numbers" if is_whole else "numbers"
    words = f"{kind}, a few of them large" if log else kind
    filled = " (gaps get the middle)" if gaps else ""
    check = f"which range is known beforehand?{filled}"
    return ColumnDraft(name, ColumnSettings.model_validate(settings), words, check)


def _is_identifier(name: str, distinct: NDArray[np.float64], rows: int) -> bool:
    """Whether whole numbers are named so, or no one comes twice in a sequence."""
    if rows < _FEW_ROWS or len(distinct) <= _MAX_CODES:
        return False
    if len(distinct) < rows or _ID_NAME.fullmatch(name):
        return _ID_NAME.fullmatch(name) is not None
    is_consecutive = bool(distinct[-1] - distinct[0] == rows - 1)
    return is_consecutive or _NUMBER_NAME.fullmatch(name) is not None


def _draft_classes(name: str, summary: ColumnSummary, reason: str, check: str) -> ColumnDraft:
    classes: list[Any] = [_as_yaml(cell) for cell in summary.cells]
    fill = {"fill": _UNKNOWN} if summary.gaps else {}
    classes += [_UNKNOWN] if summary.gaps and _UNKNOWN not in classes else []
    settings = ColumnSettings.model_validate({"classes": classes, **fill})
    return ColumnDraft(name, settings, reason, check)


def _as_yaml(cell: str) -> str | int:
    """Return a cell as the value of YAML that means the same cell: 3 for "3", but "3.0"."""
    return int(cell) if re.fullmatch(r"0|-?[1-9]\d{0,14}", cell, re.ASCII) else cell


def _rounded_outward(low: float, high: float) -> list[float]:
    """Return a range with round bounds that contains [low, high]."""
    unit = round_up((high - low) / 5)
    rounded = [_clean(floor(low / unit) * unit), _clean(ceil(high / unit) * unit)]
    return rounded if rounded[0] < rounded[1] else [low, high]


def round_up(value: float) -> float:
    """Return the smallest number ≥ `value` (> 0) among ..., 0.2, 0.5, 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** floor(np.log10(value))
    return next(_clean(step * power) for step in (1, 2, 5, 10) if step * power >= value)


def _middle(low: float, high: float, *, log: bool) -> float:
    """Return the middle of a range, on the scale of its feature."""
    if log and low >= 0:
        return float(f"{expm1((log1p(low) + log1p(high)) / 2):.2g}")
    return _clean((low + high) / 2)


def _clean(value: float) -> float:
    return float(f"{value:.12g}")


def redraft(draft: ColumnDraft, listed: ColumnSettings) -> ColumnDraft:
    """Return a draft in which the column's settings from an experiment file take precedence.

    If the settings of the file do not fit the rows, the draft's own settings stay.

    Args:
        draft: the draft that was made from the rows.
        listed: the column's settings in the experiment file.
    """
    if not isinstance(draft.settings, ColumnSettings):
        return draft
    new = draft.settings.model_dump(exclude_defaults=True)
    old = listed.model_dump(exclude_defaults=True)
    if "above" in old:
        new = {key: new[key] for key in ("fill", "missing") if key in new}
    merged = {**new, **old, **({"date": new["date"]} if "date" in new else {})}
    if isinstance(old.get("classes"), list) and "classes" in new:
        names = {as_text(cell) for cell in old["classes"]}
        merged["classes"] = [
            *old["classes"],
            *(cell for cell in new["classes"] if as_text(cell) not in names),
        ]
    elif "range" in old and "range" in new and "fill" in new and "fill" not in old:
        merged["fill"] = _middle(*old["range"], log=merged.get("log", False))
    elif isinstance(old.get("classes"), dict):
        merged = {**old, "other": list(old["classes"])[-1]}
    try:
        settings = ColumnSettings.model_validate(merged)
    except ValueError:  # the rows are of another kind than the file says
        settings = draft.settings
    return replace(draft, settings=settings)
