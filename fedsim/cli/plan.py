"""The command `fedsim plan`."""

from functools import partial
from pathlib import Path

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
from fedsim.core.errors import ExitCode


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
    if advise and plot is not None:
        raise click.UsageError("--plot draws the plan of FILE; call it without --advise")
    if advise and bounds is not None:
        raise click.UsageError("--bounds belongs to the plan of FILE; call it without --advise")
    with command_imports():
        from fedsim.experiment import load_experiment
        from fedsim.planning.projection import plan_experiment
        from fedsim.report.drawing import check_chart_path, write_chart
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

        write_chart(plan_chart(result), path)
    if as_json:
        print_json(result.to_json())
    else:
        print_tables(result)
    if result.refusal is not None:
        fail(result.refusal, ExitCode.BUDGET_FORBIDS)
