"""The command `fedsim report`."""

from pathlib import Path

import click

from fedsim.cli.options import command_imports, fail, json_option, print_json
from fedsim.core.errors import ExitCode


@click.command("report", short_help="Print the result of RUN and rewrite its report.html.")
@click.argument("directory", metavar="RUN", type=click.Path())
@json_option
def report_command(directory: str, as_json: bool) -> None:
    """Print the result of the run directory RUN and rewrite its report.html.

    A run that `fedsim verify` does not find sound gets no page: exit code 1, one line per mismatch.
    """
    with command_imports():
        from fedsim.report.html import write_report
        from fedsim.report.progress import shown_phases
        from fedsim.report.terminal import print_result
        from fedsim.runs.directory import RunDirectory
        from fedsim.runs.run_lock import hold_run
        from fedsim.runs.verification import verify_run

    run_directory = RunDirectory.open(Path(directory))
    with hold_run(run_directory.path), shown_phases() as phases:
        phases.begin("checking the run")
        problems = verify_run(run_directory, pages=False).problems
        if not problems:
            phases.begin("writing the report")
            write_report(run_directory)
    if problems:
        problem_lines = "\n".join(f"{directory}: {problem}" for problem in problems)
        fail(
            f"{problem_lines}\n{directory}: not sound, so report.html was not written",
            ExitCode.FAILED,
        )
    if as_json:
        print_json(
            {
                "summary": run_directory.read_json("summary.json"),
                "privacy": run_directory.read_json("privacy.json"),
            }
        )
    else:
        print_result(run_directory)
