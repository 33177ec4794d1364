"""The command `deploy`."""

from pathlib import Path

import click

from fedsim.cli.options import json_option, overrides_argument, print_json


@click.command("deploy", short_help="Write FILE as a Flower app for SuperNodes.")
@click.argument("file", type=click.Path())
@overrides_argument
@click.option("--out", type=click.Path(), required=True, help="The app's directory, new or empty.")
@json_option
def deploy_command(file: str, overrides: tuple[str, ...], out: str, as_json: bool) -> None:
    """Write FILE as a Flower app for `flwr run`, on a SuperLink and SuperNodes.

    docs/deployment.md describes every step.
    """
    from fedsim.experiment import load_experiment
    from fedsim.tools.deployment.flower_app import write_app

    loaded = load_experiment(file, overrides)
    app = write_app(loaded, Path(out))
    privacy = loaded.experiment.privacy
    if privacy is not None and privacy.noise == "seeded":
        click.echo(
            "warning: privacy.noise is seeded: the server and every reader of the app know the "
            "seed and can subtract the noise; where data need protection, set privacy.noise=secure",
            err=True,
        )
    secure = loaded.experiment.secure_aggregation
    if privacy is not None and privacy.trust.name == "distributed" and secure is not None:
        for key in ("helper_fingerprints", "client_fingerprints"):
            if not getattr(secure.keys, key):
                click.echo(
                    f"warning: secure_aggregation.keys.{key} is empty: nothing keeps the server "
                    "to the protocol, so the statement will claim the ε against the server alone",
                    err=True,
                )
    if as_json:
        print_json(
            {
                "path": str(app.path),
                "clients": app.num_nodes,
                "node_files": [str(file) for file in app.node_files],
                "plugin_digest": app.plugin_digest,
            }
        )
        return
    click.echo(f"{app.path}: a Flower app for {app.num_nodes} SuperNodes; see docs/deployment.md")
    if app.plugin_digest is not None:
        click.echo(f"plugin_digests of a node's policy: {app.plugin_digest}")
    for path in app.node_files:
        click.echo(f"not in the app: {path}; copy it to this path on every node", err=True)
