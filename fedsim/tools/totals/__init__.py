"""Privacy totals of clients over several runs and ledgers, also of other tools: `fedsim totals`."""

from pathlib import Path
from typing import Any

import click

from fedsim.cli.options import json_option, print_json


@click.command("totals", short_help="Total privacy spend of each client over RUNs and LEDGERs.")
@click.argument("sources", metavar="(RUN | LEDGER)...", nargs=-1, required=True)
@click.option("--delta", type=float, help="δ of every ε. Default: that of the runs.")
@click.option(
    "--accountant",
    "accountants",
    multiple=True,
    type=click.Choice(["pld", "rdp", "moments"]),
    help="Accountant; give it again for another column. Default: that of the runs, or pld.",
)
@click.option(
    "--adjacency",
    type=click.Choice(["zero_out", "add_remove", "replace_one"]),
    help="Adjacency of the events of a LEDGER. Default: that of the runs, or zero_out.",
)
@click.option(
    "--clients",
    "clients_file",
    type=click.Path(),
    help="YAML or JSON map from a client to its places, each SOURCE:CLIENT, or SOURCE for a file "
    "that names no client. Default: clients of one number are the same.",
)
@click.option(
    "--independent-noise",
    is_flag=True,
    help="Take seeded noise of runs with one seed as independent, as their simulations do.",
)
@click.option(
    "--registry",
    type=click.Path(),
    help="Also write a draft entry of the public registry of deployments to this new YAML file.",
)
@json_option
def account_command(
    sources: tuple[str, ...],
    delta: float | None,
    accountants: tuple[Any, ...],
    adjacency: Any,
    clients_file: str | None,
    independent_noise: bool,
    registry: str | None,
    as_json: bool,
) -> None:
    """Add up what each client spent in several runs on the same data, and print its ε.

    A RUN is a run directory; its ledger counts, also before the run has ended. A LEDGER is a
    ledger.jsonl, or a JSON file: a list of events, of fedsim or dp-accounting; an object with
    `ledger`, `clients`, or the `history` of an accountant of Opacus; or YAML: an entry of the
    registry of deployments, or a training file. What --json prints is a LEDGER.

    A training file says what training code of others does, and what its authors say; ε of both is
    printed side by side.

    Runs of other units, adjacencies or observers have no ε together and are refused. So are runs
    with seeded noise of one seed, as the noise of one is that of the other.
    """
    from fedsim.tools.totals.outputs import print_account, print_training, registry_entry
    from fedsim.tools.totals.sources import read_clients, read_source
    from fedsim.tools.totals.totals import account_of
    from fedsim.tools.totals.training import report_of

    if delta is not None and not 0.0 < delta < 1.0:
        raise click.BadParameter(f"must be in (0, 1), got {delta:g}", param_hint="--delta")
    if registry is not None and Path(registry).exists():
        raise click.BadParameter(f"{registry} exists already", param_hint="--registry")
    read = [read_source(source) for source in sources]
    account = account_of(
        read,
        delta=delta,
        accountants=accountants,
        adjacency=adjacency,
        clients=None if clients_file is None else read_clients(clients_file),
        independent_noise=independent_noise,
    )
    if registry is not None:
        Path(registry).write_text(registry_entry(account, read))
    reports = [report_of(s.name, s.training, accountants) for s in read if s.training is not None]
    if as_json:
        trainings = {"trainings": [report.to_json() for report in reports]} if reports else {}
        print_json(account.to_json() | trainings)
    else:
        for report in reports:
            print_training(report)
        if not reports or len(read) > 1 or delta is not None:
            print_account(account)
    if registry is not None:
        click.echo(f"registry: {registry}, a draft: fill in the empty fields", err=True)
