"""Privacy audit by attacks (`fedsim audit`): measured leakage of each client, and its claimed ε."""

from contextlib import nullcontext
from typing import Any

import click

from fedsim.cli.options import (
    command_imports,
    fail,
    json_option,
    overrides_argument,
    print_json,
    verbose_option,
)
from fedsim.core.errors import ExitCode
from fedsim.core.limits import MAX_AUDITED_STEPS, MAX_CLIENTS


@click.command("audit", context_settings={"show_default": True})
@click.argument("file", type=click.Path())
@overrides_argument
@click.option(
    "--clients",
    type=click.IntRange(min=1, max=MAX_CLIENTS),
    default=10,
    help="Maximum number of clients to audit, largest claimed ε first.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=MAX_AUDITED_STEPS),
    default=1000,
    help="Minimum number of steps per client; more steps give tighter bounds.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1.0, min_open=True, max_open=True),
    default=0.999,
    help="Probability that a correct federation passes.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print only the result, no progress.")
@verbose_option
@json_option
def audit_command(
    file: str, overrides: tuple[str, ...], quiet: bool, as_json: bool, **limits: Any
) -> None:
    """Attack the clients of FILE with canaries: claimed, certified and estimated ε.

    Each client's own mechanism runs on its own model and data. Exit code 1 means that noise,
    clipping or sampling differ from what the client is charged for; see docs/howto/attack.md.
    """
    with command_imports(quiet=quiet):
        from fedsim.experiment import load_experiment
        from fedsim.report.progress import shown_phases
        from fedsim.tools.attack.audit import audit_experiment, print_audit

    def print_progress(done: int, of: int) -> None:
        if not quiet:
            click.echo(f"client {done}/{of} audited", err=True)

    loaded = load_experiment(file, overrides)
    with nullcontext() if quiet else shown_phases() as phases:
        result = audit_experiment(loaded, **limits, on_client=print_progress, phases=phases)
    if as_json:
        print_json(result.to_json())
    else:
        print_audit(result)
    if result.violations:
        fail("\n".join(result.violations), ExitCode.FAILED)
