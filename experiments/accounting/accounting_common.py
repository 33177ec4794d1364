"""What the accounting scripts share: their options, a table, a plot."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fedsim.report.chart import Chart
from fedsim.report.drawing import ChartFigure

Number = TypeVar("Number", int, float)


def add_options(
    parser: argparse.ArgumentParser, *, formats: Sequence[str] = ("png", "svg", "pdf")
) -> None:
    """Add the options of every script: the directory and the format of its plots.

    Args:
        parser: of the script.
        formats: suffixes of plots, the usual one first.
    """
    parser.add_argument("--out", type=Path, default=Path(), help="directory for the plots")
    parser.add_argument("--format", choices=formats, default=formats[0], help="of the plots")


def run(script: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Run a script with its parsed options; a number outside its range is one line on stderr."""
    arguments = parser.parse_args()
    try:
        script(arguments)
    except ValueError as error:
        parser.error(str(error))


def numbers(kind: Callable[[str], Number]) -> Callable[[str], tuple[Number, ...]]:
    """Return a parser of `1,10,100` as a tuple of numbers of a kind."""

    def parse(text: str) -> tuple[Number, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = "list of numbers"  # argparse names it in errors
    return parse


def show(text: str) -> None:
    """Writes one line to standard output."""
    sys.stdout.write(text + "\n")


def show_table(columns: Mapping[str, Sequence[float | None]]) -> None:
    """Writes the columns under their names, four significant digits."""
    width = max(12, *(len(name) + 2 for name in columns))
    show("".join(name.rjust(width) for name in columns))
    for row in zip(*columns.values(), strict=True):
        cells = ("nan" if value is None else f"{value:.4g}" for value in row)
        show("".join(cell.rjust(width) for cell in cells))


def save_plot(arguments: argparse.Namespace, name: str, plot: Chart) -> None:
    """Saves a plot in the look of the report into the directory of the options."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{name}.{arguments.format}"
    ChartFigure(plot).save(path)
    show(f"plot: {path}")
