"""The command `fedsim run`."""

import shlex
from pathlib import Path
from time import monotonic

import click

from fedsim.cli.options import (
    command_imports,
    fail,
    json_option,
    overrides_argument,
    print_json,
    verbose_option,
)
from fedsim.cli.registry import OPTIONS
from fedsim.core.commands import Interruption
from fedsim.core.errors import ExitCode


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
        reason = str(interrupt) or "interrupted by the user"
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
