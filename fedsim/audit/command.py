"""The `fedsim audit` command. Nothing heavy is imported before it is called."""

import json
import sys

import click

from fedsim.core.errors import ExitCode


@click.command()
@click.argument("file", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option(
    "--clients",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many to audit: those that claim to spend the most.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Steps that each of them takes; more give tighter bounds.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1.0, min_open=True, max_open=True),
    default=0.999,
    show_default=True,
    help="That a sound federation passes.",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress, only the result.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def audit(
    file: str,
    overrides: tuple[str, ...],
    clients: int,
    steps: int,
    confidence: float,
    quiet: bool,
    as_json: bool,
) -> None:
    """Attack the clients of FILE with planted examples; say what ε they spend at least.

    Each client's own mechanism runs on its own model and data. Exit code 1 where the noise, the
    clipping or the sampling is not what the client is charged for; see docs/howto/attack.md.
    """
    from fedsim.audit.audit import audit_experiment
    from fedsim.audit.terminal import print_audit
    from fedsim.experiment import load_experiment

    def told(done: int, of: int) -> None:
        if not quiet:
            click.echo(f"client {done}/{of} audited", err=True)

    found = audit_experiment(
        load_experiment(file, overrides),
        clients=clients,
        steps=steps,
        confidence=confidence,
        on_client=told,
    )
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        print_audit(found)
    for violation in found.violations:
        click.echo(violation, err=True)
    if found.violations:
        sys.exit(ExitCode.FAILED)
