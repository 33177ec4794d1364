"""The figures of a comparison: on the page, as SVG files and as CSV.

Every figure is a `Picture`: its numbers, and how they are drawn. Matplotlib is imported with this
package, so import it when drawing.
"""

from pathlib import Path

from fedsim.comparison.figures.clients import fairness, metric_boxes, spend_boxes
from fedsim.comparison.figures.curves import over_epsilon, over_rounds, tradeoff
from fedsim.comparison.figures.picture import Picture
from fedsim.comparison.figures.settings import against_settings
from fedsim.comparison.results import Results
from fedsim.runs.directory import RunDirectory

DIRECTORY = "figures"


def pictures_of(results: Results) -> dict[str, Picture | None]:
    """Return the figures of the variants of one unit, by what they are; None: nothing to draw."""
    metric = _client_metric(results)
    return {
        "tradeoff": tradeoff(results),
        "rounds": over_rounds(results),
        "over_epsilon": over_epsilon(results),
        "fairness": None if metric is None else fairness(results, metric),
        "boxes": None if metric is None else metric_boxes(results, metric),
        "spend": spend_boxes(results),
    }


def write_figures(results: Results, directory: Path) -> None:
    """Write each figure as SVG and as CSV into `figures/`; former figures are removed.

    Args:
        results: the results of the comparison.
        directory: its directory.
    """
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    pictures: list[Picture] = []
    for part in results.by_unit:
        pictures += [one for one in pictures_of(part).values() if one is not None]
        pictures += against_settings(part)
    files = {f"{one.name}.{kind}" for one in pictures for kind in ("svg", "csv")}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".svg", ".csv") and path.name not in files:
            path.unlink()
    writer = RunDirectory(folder)
    for picture in pictures:
        writer.write_text(f"{picture.name}.svg", picture.to_svg())
        writer.write_text(f"{picture.name}.csv", picture.to_csv())


def _client_metric(results: Results) -> str | None:
    """Return the per-client metric that corresponds to the compared metric."""
    for run in results.outcomes:
        for row in run.client_metrics:
            wanted = "client_" + results.metric.removeprefix("test_")
            return wanted if wanted in row else "client_loss"
    return None
