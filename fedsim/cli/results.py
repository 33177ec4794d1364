"""Commands on the directory of a run: show its result, predict with its model, verify it."""

import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedsim.cli.options import command_imports, fail, json_option, print_json
from fedsim.cli.registry import OPTIONS
from fedsim.core.errors import ExitCode
from fedsim.core.text_formats import csv_text, json_value

if TYPE_CHECKING:
    from fedsim.runs.saved_model import Predictions
    from fedsim.runs.verification import Verification

_PRINTED = ("summary", "privacy")  # files of a run, without .json
_REPLAYED = ("rounds", "uploads", "charges")


@click.command("report", short_help="Print the result of RUN and rewrite its report.html.")
@click.argument("directory", metavar="RUN", type=click.Path())
@json_option
def report_command(directory: str, as_json: bool) -> None:
    """Print the result of the run directory RUN and rewrite its report.html.

    A run that `fedsim verify` does not find sound gets no page: exit code 1, one line per mismatch.
    """
    with command_imports():
        from fedsim.report.contents import read_contents
        from fedsim.report.html import render_report, save_report
        from fedsim.report.progress import shown_phases
        from fedsim.report.terminal import print_result
        from fedsim.runs.directory import RunDirectory
        from fedsim.runs.files import RunLock
        from fedsim.runs.verification import verify_run
        from fedsim.runs.verification.spend import attempt

    run_directory, pages = RunDirectory.open(Path(directory)), list[str]()

    def render() -> tuple[str, ...]:
        pages.append(render_report(read_contents(run_directory)))
        return ()

    with closing(RunLock(run_directory.path)), shown_phases() as phases:
        phases.begin("checking the run")
        problems = verify_run(run_directory, pages=False).problems
        if not problems:
            phases.begin("writing the report")
            problems = attempt("figures beside the checked ones", render)
        if not problems:
            save_report(run_directory, pages[0])
    if problems:
        found = (*problems, "not sound, so report.html was not written")
        fail("\n".join(f"{directory}: {line}" for line in found), ExitCode.FAILED)
    if as_json:
        print_json({name: run_directory.read_json(f"{name}.json") for name in _PRINTED})
    else:
        print_result(run_directory)


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
        columns = json_value(predictions.columns)
        print_json({"predictions": columns, "scores": predictions.scores})
        return
    rows = zip(*predictions.columns.values(), strict=True)
    text = csv_text(predictions.columns, (map(_cell, row) for row in rows))
    if out is None:
        click.echo(text, nl=False)
    else:
        Path(out).write_text(text, encoding="utf-8")
        click.echo(f"{len(predictions):,} predictions: {out}", err=True)


def _cell(cell: object) -> object:
    return f"{cell:.6g}" if isinstance(cell, float) else cell


def _score_lines(predictions: "Predictions") -> list[str]:
    """Return lines with the scores on the file's targets, the baseline, recalls and warnings."""
    if predictions.scores is None:
        return []
    from fedsim.core.formatting import metric_text
    from fedsim.report.contents import Scores

    scores = Scores.model_validate(predictions.scores)
    others = {name: value for name, value in scores.metrics.items() if name != "accuracy"}
    texts = [f"{name} {metric_text(name, value)}" for name, value in others.items()]
    if scores.accuracy is not None:
        texts.append(f"accuracy {metric_text('accuracy', scores.accuracy)} ({scores.baseline})")
    lines = [f"{text} on {len(predictions):,} examples" for text in texts]
    return [*lines, *scores.lines, *(f"warning: {warning}" for warning in scores.warnings)]


@click.command("verify", short_help="Check every file of RUN; recompute every ε.")
@click.argument("directory", metavar="RUN", type=click.Path())
@click.option(
    "--root", help="Root of manifest.json, as `fedsim run` printed it and you kept it elsewhere."
)
@click.option(
    "--replay",
    is_flag=True,
    help="Run the federation again and compare all that left its clients; imports its plug-ins.",
)
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --replay: directory of the experiment's relative paths. Default: the current one.",
)
@json_option
def verify_command(
    directory: str, root: str | None, replay: bool, base: Path | None, as_json: bool
) -> None:
    """Check every file of the run directory RUN and recompute every ε from its ledger.

    The files are compared with manifest.json and with each other. Only --root finds a forger who
    rewrote all of them consistently. Folders of trackers are not covered. Exit code 1 and one line
    per mismatch if a check fails, also for a run that has not ended.

    --replay takes as long as the run. It needs seeded noise, the run's data and plug-ins, its
    version of fedsim, torch and numpy, and its kind of processor: otherwise exit code 2.

    RUN may be the directory of a search (`fedsim compare FILE --select`): both of its figures are
    recomputed from its ledger, and --root is the hash of the last record there.
    """
    with command_imports():
        from fedsim.core.formatting import epsilon_text
        from fedsim.report.progress import shown_phases
        from fedsim.runs.directory import RunDirectory
        from fedsim.runs.files import refuse_in_use
        from fedsim.runs.verification import verify_run

    if root is not None and not re.fullmatch("[0-9a-fA-F]{64}", root):
        rule = f"must be 64 hexadecimal digits, got {root!r}"
        raise click.BadParameter(rule, param_hint="--root")
    search = OPTIONS["verify of a search"](Path(directory), root=root, replay=replay)
    if search is not None:
        lines = [f"{directory}: sound", *search.statement, f"root: {search.root}"]
        _print_check(directory, search, lines, as_json=as_json, statement=search.statement)
        return
    run_directory = RunDirectory.open(Path(directory))
    refuse_in_use(run_directory.path)
    more = dict[str, dict[str, int]]()
    with shown_phases() as phases:
        phases.begin("checking the files and every ε")
        verification = verify_run(run_directory, root=root)
        if replay and not verification.problems:
            replayed = OPTIONS["verify --replay"](run_directory, base=base, phases=phases)
            more["replayed"] = {name: getattr(replayed, name) for name in _REPLAYED}
            verification = replace(verification, problems=replayed.problems)
    epsilons = verification.epsilons
    text = f"largest ε = {epsilon_text(max(epsilons))}" if epsilons else "no privacy was claimed"
    lines = [f"{directory}: sound ({len(epsilons)} clients recomputed, {text})"]
    if verification.root is not None:
        lines.append(f"root: {verification.root}")
    if "replayed" in more:
        repeated = ", ".join(f"{n} {name}" for name, n in more["replayed"].items())
        lines.append(f"replayed: {repeated}, all as recorded")
    _print_check(directory, verification, lines, as_json=as_json, **more)


def _print_check(
    directory: str, found: "Verification", lines: list[str], *, as_json: bool, **more: object
) -> None:
    """Print the result of a check of a run or a search; exit with code 1 if it found problems."""
    if as_json:
        facts = {name: getattr(found, name) for name in ("problems", "unchecked", "root")}
        print_json({"sound": not found.problems, **facts, **more})
    elif found.problems:
        click.echo("\n".join(f"{directory}: {problem}" for problem in found.problems), err=True)
    else:
        click.echo("\n".join(lines))
    for item in found.unchecked:
        click.echo(f"{directory}: not checked: {item}", err=True)
    if found.problems:
        sys.exit(ExitCode.FAILED)
