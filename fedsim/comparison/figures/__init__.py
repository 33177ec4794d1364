"""The figures of a comparison: on the page, as SVG files and as CSV."""

from pathlib import Path

from fedsim.comparison.figures.settings import against_settings
from fedsim.comparison.figures.variants import pictures_of
from fedsim.comparison.results import Results
from fedsim.report.drawing import file_svg
from fedsim.runs.directory import RunDirectory

DIRECTORY = "figures"


def write_figures(results: Results, directory: Path) -> None:
    """Write each figure as SVG and as CSV into `figures/`; former figures are removed.

    Args:
        results: the results of the comparison.
        directory: its directory.
    """
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    found = [one for part in results.by_unit for one in pictures_of(part).values()]
    pictures = [one for one in found if one is not None]
    pictures += [one for part in results.by_unit for one in against_settings(part)]
    files = {f"{one.name}.{kind}" for one in pictures for kind in ("svg", "csv")}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".svg", ".csv") and path.name not in files:
            path.unlink()
    writer = RunDirectory(folder)
    for one in pictures:
        writer.write_text(f"{one.name}.svg", file_svg(one.chart))
        writer.write_text(f"{one.name}.csv", one.to_csv())
