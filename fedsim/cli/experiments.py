"""Commands on an experiment file: write, check, plan and run it, and list what it may name."""

import shlex
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from fedsim.cli.options import (
    bounds_option,
    command_imports,
    fail,
    json_option,
    overrides_argument,
    print_json,
    verbose_option,
)
from fedsim.cli.registry import OPTIONS
from fedsim.core.commands import INTERRUPTED, Interruption
from fedsim.core.errors import ExitCode

if TYPE_CHECKING:
    from fedsim.experiment import Experiment
    from fedsim.starter.tables import TableExperiment

_PIPED_WIDTH = 1000  # one line for each name, for grep


@click.command("init", short_help="Write an experiment to start from into a new directory DIR.")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--data",
    metavar="FILE",
    type=click.Path(),
    help="A table, .csv or .parquet: its experiment is drafted from its rows.",
)
@click.option("--target", metavar="COLUMN", help="Column to predict; else found by its name.")
@click.option(
    "--clients", metavar="COLUMN", help="Column with the client of each row; else found by name."
)
@json_option
def init_command(
    directory: str, data: str | None, target: str | None, clients: str | None, as_json: bool
) -> None:
    """Write an experiment, a model and their tests into DIR, a new or empty directory.

    The files are commented and run as they stand, without network or data of your own. With --data
    it is an experiment on a table of your own, with a line for each of its columns.
    """
    if data is not None:
        _draft(Path(directory), Path(data), target, clients, as_json)
        return
    if target is not None or clients is not None:
        raise click.UsageError("--target and --clients name columns of a table; add --data FILE")
    from fedsim.starter import STARTER_FILES, write_starter

    written = write_starter(Path(directory))
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return
    width = max(len(str(path)) for path in written)
    for path, description in zip(written, STARTER_FILES.values(), strict=True):
        click.echo(f"{path!s:<{width}}  {description}")
    _print_next(directory, "plan experiment.yaml", "run experiment.yaml")
    click.echo("  python -m pytest test_model.py")


def _draft(
    directory: Path, data: Path, target: str | None, clients: str | None, as_json: bool
) -> None:
    from fedsim.starter.tables import write_table_experiment

    draft = write_table_experiment(directory, data, target=target, clients=clients)
    if as_json:
        print_json(_draft_json(draft))
        return
    click.echo(f"{draft.path}  drafted from {draft.rows:,} rows of {data}")
    click.echo(f"target: {draft.target} ({draft.target_reason})")
    click.echo(f"clients: {draft.clients or 'iid'} ({draft.clients_reason})")
    width = max(len(column.name) for column in draft.columns)
    for column in draft.columns:
        click.echo(f"  {column.name:<{width}}  {column.value or 'as it is':<38}  {column.reason}")
    click.echo(
        "These constants were read from the rows, which no ε covers: the file has a question for "
        "each,\nto answer from public knowledge before an ε is published."
    )
    _print_next(str(directory), "validate experiment.yaml --data", "run experiment.yaml")


def _draft_json(draft: "TableExperiment") -> dict[str, object]:
    columns = dict[str, object]()
    for column in draft.columns:
        settings = column.settings
        if settings is not None and not isinstance(settings, str):
            settings = settings.model_dump(exclude_defaults=True)
        facts = {"settings": settings, "reason": column.reason, "check": column.check}
        columns[column.name] = facts
    chosen = {"rows": draft.rows, "target": draft.target, "clients": draft.clients}
    return {"files": [str(draft.path)], **chosen, "columns": columns}


def _print_next(directory: str, *commands: str) -> None:
    click.echo("next:")
    click.echo(f"  cd {shlex.quote(directory)}")
    for command in commands:
        click.echo(f"  fedsim {command}")


@click.command("validate", short_help="Check the experiment in FILE without running it.")
@click.argument("file", type=click.Path())
@overrides_argument
@verbose_option
@click.option(
    "--data",
    "with_data",
    is_flag=True,
    help="Also load data, model and plug-ins and make every check that a run makes before round 1.",
)
@json_option
def validate_command(file: str, overrides: tuple[str, ...], with_data: bool, as_json: bool) -> None:
    """Check the experiment in FILE without running it or importing its plug-ins.

    Lists the code that a run would execute and the files that it would read. With --data this code
    is executed and these files are read, and the last lines describe the data.
    """
    with command_imports():
        from fedsim.experiment import load_experiment
        from fedsim.planning.validation import find_footprint, plugin_digest

    loaded = load_experiment(file, overrides)
    content, lines = loaded.experiment.model_dump(mode="json"), list[str]()
    if with_data:
        with command_imports():
            from fedsim.planning.validation import check_data
            from fedsim.report.progress import headline, notes, shown_phases, warnings

        with shown_phases() as phases:
            findings = check_data(loaded, phases=phases)
        told, warned = notes(findings.federation), warnings(findings.federation)
        content = {**findings.to_json(), "notes": told, "warnings": warned}
        lines = [*headline(findings.federation), *findings.lines()]
        lines += [*(f"note: {text}" for text in told), *(f"warning: {text}" for text in warned)]
    if as_json:
        print_json(content)
        return
    click.echo(f"{file}: ok ({loaded.experiment.name}, {_privacy_in_words(loaded.experiment)})")
    digest = plugin_digest(loaded)
    node = [] if digest is None else [f"  plugin_digests of a node's policy: {digest}"]
    for line in (*find_footprint(loaded).lines(), *node, *(f"  {line}" for line in lines)):
        click.echo(line)


def _privacy_in_words(experiment: "Experiment") -> str:
    """Return the privacy of an experiment in words; `privacy: null` must be visible here."""
    privacy = experiment.privacy
    if privacy is None or experiment.not_private:
        return experiment.not_private
    goal = privacy.goal
    if privacy.target_epsilon is not None:
        delta = privacy.delta
        goal += " at a δ by client size" if delta == "auto" else f" at δ = {delta:g}"
    elif not goal:
        noise = privacy.noise_multiplier
        goal = "the noise of each group" if noise is None else f"noise multiplier {noise:g}"
    return f"{experiment.release_kind.releases} with {goal}"


@click.command("plan", short_help="Show the privacy spend and noise of FILE, without training.")
@click.argument("file", type=click.Path())
@overrides_argument
@click.option(
    "--plot", type=click.Path(), help="Write ε over the rounds to a .svg, .png or .pdf file."
)
@click.option(
    "--advise",
    is_flag=True,
    help="Compare other sampling rates, steps, rounds and weights at the same ε; print the lines "
    "to change.",
)
@bounds_option(is_always=False, words="Also print other bounds on ε")
@verbose_option
@json_option
def plan_command(
    file: str,
    overrides: tuple[str, ...],
    plot: str | None,
    advise: bool,
    bounds: tuple[str, ...] | None,
    as_json: bool,
) -> None:
    """Show the privacy spend and the noise of FILE, without training.

    Exit code 3 if a privacy budget forbids the run.
    """
    for option, given in (("--plot", plot), ("--bounds", bounds)):
        if advise and given is not None:
            raise click.UsageError(f"{option} is of the plan of FILE; call it without --advise")
    with command_imports():
        from fedsim.experiment import load_experiment
        from fedsim.planning.projection import plan_experiment
        from fedsim.report.drawing import ChartFigure, check_chart_path
        from fedsim.report.plan_terminal import print_plan
        from fedsim.report.progress import shown_phases

    path = None if plot is None else check_chart_path(Path(plot))
    loaded, curves = load_experiment(file, overrides), as_json or path is not None
    perform, print_tables = partial(plan_experiment, curves=curves, bounds=bounds), print_plan
    if advise:
        perform, print_tables = OPTIONS["plan --advise"], OPTIONS["print of plan --advise"]
    with shown_phases() as phases:
        result = perform(loaded, phases=phases)
    if path is not None:
        from fedsim.report.plots import plan_chart

        ChartFigure(plan_chart(result)).save(path)
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(result)
    if result.refusal is not None:
        fail(result.refusal, ExitCode.BUDGET_FORBIDS)


@click.command("run")
@click.argument("file", type=click.Path())
@overrides_argument
@click.option(
    "--out", type=click.Path(), help="Run directory, new or empty. Default: runs/NAME-TIME."
)
@click.option("--resume", is_flag=True, help="Continue the run in --out after its last round.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result, no progress.")
@click.option(
    "--profile", type=click.Path(), help="Write a time profile for speedscope.app (JSON)."
)
@verbose_option
@json_option
@click.pass_obj
def run_command(
    interruption: Interruption | None,
    file: str,
    overrides: tuple[str, ...],
    out: str | None,
    resume: bool,
    quiet: bool,
    profile: str | None,
    as_json: bool,
) -> None:
    """Run the experiment in FILE and write its run directory.

    KEY.PATH=VALUE replaces a key of the file: fedsim run exp.yaml federation.rounds=5 privacy=off
    """
    began = monotonic()
    with command_imports(quiet=quiet):
        from fedsim.profiling import profile_to
        from fedsim.report.progress import ProgressCallback
        from fedsim.report.run import run
        from fedsim.report.terminal import print_result
        from fedsim.runs.directory import RunDirectory
        from fedsim.runs.manifest import root_of
        from fedsim.runs.resume import resume_command
        from fedsim.runs.runner import RunFailedError
        from fedsim.tracking.callbacks import CheckingCallback

    observer = None if quiet else ProgressCallback()
    if interruption is not None:
        observer = CheckingCallback(interruption.raise_again, observer)
    try:
        with profile_to(None if profile is None else Path(profile), name=file):
            result = run(file, overrides=overrides, out=out, resume=resume, callback=observer)
    except RunFailedError as error:
        go_on = resume_command(file, overrides, error.result.path)
        fail(f"{error}\nfiles of the run: {error.result.path}; to go on: {go_on}", ExitCode.FAILED)
    except KeyboardInterrupt as interrupt:
        hint = "nothing was written, so run the same command again"
        if resume and out is not None:
            hint = f"to go on: {resume_command(file, overrides, Path(out))}"
        reason = str(interrupt) or INTERRUPTED
        fail(f"{reason} during the set-up; {hint}", ExitCode.INTERRUPTED)
    if as_json:
        directory = RunDirectory(result.path)
        summary = directory.read_json("summary.json")
        print_json({**summary, "path": str(result.path), "root": root_of(directory)})
    else:
        print_result(RunDirectory(result.path), waited=monotonic() - began)
        if not quiet:
            _point_to_advice(file, overrides)
    if result.status == "interrupted":
        go_on = resume_command(file, overrides, result.path)
        fail(f"{result.reason}; to go on: {go_on}", ExitCode.INTERRUPTED)


def _point_to_advice(file: str, overrides: tuple[str, ...]) -> None:
    """Print the command that compares other schedules at the same ε, if it applies to FILE."""
    from fedsim.experiment import load_experiment

    if OPTIONS["why not plan --advise"](load_experiment(file, overrides).experiment) is None:
        command = shlex.join(["fedsim", "plan", file, *overrides, "--advise"])
        click.echo(f"next: {command} compares other rounds, steps and batches at this ε", err=True)


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from fedsim.experiment import json_schema

    print_json(json_schema())


@click.command("list", short_help="List the built-in names of experiment files.")
@click.argument("kinds", nargs=-1, metavar="[KIND]...")
@json_option
def list_command(kinds: tuple[str, ...], as_json: bool) -> None:
    """List the built-in names of experiment files by kind, with a line on each.

    A KIND, such as datasets, metrics or samplings, lists the names of that kind alone.
    """
    from fedsim.catalog import KEYS, catalog
    from fedsim.experiment.errors import any_of, did_you_mean

    entries = catalog()
    for kind in kinds:
        if kind not in entries:
            hint = did_you_mean(kind, entries) or f"; there are {any_of(list(entries))}"
            fail(f"there is no kind {kind!r}{hint}", ExitCode.WRONG_INPUT)
    chosen = {kind: names for kind, names in entries.items() if not kinds or kind in kinds}
    if as_json:
        print_json(chosen)
        return
    formatter = click.HelpFormatter(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    for kind, names in chosen.items():
        with formatter.section(f"{kind} ({KEYS[kind]})"):
            formatter.write_dl(list(names.items()), col_max=40)
    click.echo(formatter.getvalue().lstrip("\n"), nl=False)
