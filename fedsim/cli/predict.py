"""The command `fedsim predict`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedsim.cli.options import command_imports, fail, json_option, print_json
from fedsim.core.errors import ExitCode
from fedsim.core.text_formats import csv_text, finite_or_none

if TYPE_CHECKING:
    from fedsim.runs.saved_model import Predictions


@click.command("predict", short_help="Predict the examples in FILE with the model of RUN.")
@click.argument("directory", metavar="RUN", type=click.Path())
@click.argument("file", type=click.Path())
@click.option("--out", type=click.Path(), help="Write the table to this new .csv file.")
@click.option(
    "--base",
    type=click.Path(),
    help="Directory of the experiment file, where its plug-ins are. Default: the current one.",
)
@json_option
def predict_command(
    directory: str, file: str, out: str | None, base: str | None, as_json: bool
) -> None:
    """Predict the examples in FILE (.csv, .parquet or .npz) with the final model of RUN.

    FILE is read as the run read its data, with or without the target. The result is a CSV table:
    columns that are no features, the prediction, and the probability of each class. With targets,
    their scores are printed beside it.
    """
    with command_imports():
        from fedsim.runs.saved_model import predict

    if out is not None and Path(out).exists():
        fail(f"{out} exists; nothing is overwritten: choose another --out", ExitCode.WRONG_INPUT)
    predictions = predict(directory, file, base=base)
    for line in _score_lines(predictions):
        click.echo(line, err=True)
    if as_json:
        print_json({"predictions": _json(predictions), "scores": predictions.scores})
        return
    text = _table(predictions)
    if out is None:
        click.echo(text, nl=False)
    else:
        Path(out).write_text(text, encoding="utf-8")
        click.echo(f"{len(predictions):,} predictions: {out}", err=True)


def _json(predictions: "Predictions") -> dict[str, list[object]]:
    """Return the columns of predictions by name, with null for numbers that are not finite."""
    return {
        name: [finite_or_none(value) if isinstance(value, float) else value for value in column]
        for name, column in predictions.columns.items()
    }


def _table(predictions: "Predictions") -> str:
    return csv_text(
        predictions.columns,
        (
            [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row]
            for row in zip(*predictions.columns.values(), strict=True)
        ),
    )


def _score_lines(predictions: "Predictions") -> list[str]:
    """Return lines with the scores on the file's targets, the baseline, recalls and warnings."""
    if predictions.scores is None:
        return []
    from fedsim.core.formatting import metric_text
    from fedsim.report.contents import Scores

    scores = Scores.from_json(predictions.scores)
    lines = [
        f"{name} {metric_text(name, value)} on {len(predictions):,} examples"
        for name, value in scores.metrics.items()
        if name != "accuracy"
    ]
    if scores.accuracy is not None:
        accuracy = metric_text("accuracy", scores.accuracy)
        lines.append(f"accuracy {accuracy} ({scores.baseline}) on {len(predictions):,} examples")
    return [*lines, *scores.lines, *(f"warning: {warning}" for warning in scores.warnings)]
