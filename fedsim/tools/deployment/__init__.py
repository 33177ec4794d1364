"""Deployed federations: the simulator's apps under Flower's SuperLink and SuperNodes.

`flower_app` writes an experiment as a Flower app. That app runs `server_app` next to the SuperLink
and `client_app` on every SuperNode. `node_state` keeps the state of a node on disk.
"""

from pathlib import Path

import click

from fedsim.cli.options import fail, json_option, overrides_argument, print_json, say
from fedsim.core.errors import ExitCode
from fedsim.core.text_formats import json_value


@click.command("deploy", short_help="Write FILE as a Flower app for SuperNodes.")
@click.argument("file", type=click.Path())
@overrides_argument
@click.option("--out", type=click.Path(), required=True, help="The app's directory, new or empty.")
@json_option
def deploy_command(file: str, overrides: tuple[str, ...], out: str, as_json: bool) -> None:
    """Write FILE as a Flower app for `flwr run`, on a SuperLink and SuperNodes.

    docs/howto/deployment.md describes every step.
    """
    from fedsim.experiment import load_experiment
    from fedsim.tools.deployment.flower_app import write_app

    loaded = load_experiment(file, overrides)
    app = write_app(loaded, Path(out))
    privacy = loaded.experiment.privacy
    if privacy is not None and privacy.noise == "seeded":
        say(
            "warning: privacy.noise is seeded: the server and every reader of the app know the "
            "seed and can subtract the noise; where data need protection, set privacy.noise=secure"
        )
    secure = loaded.experiment.secure_aggregation
    if privacy is not None and privacy.trust.name == "distributed" and secure is not None:
        for key in ("helper_fingerprints", "client_fingerprints"):
            if not getattr(secure.keys, key):
                say(
                    f"warning: secure_aggregation.keys.{key} is empty: nothing keeps the server "
                    "to the protocol, so the statement will claim the ε against the server alone"
                )
    if as_json:
        facts = {"path": app.path, "clients": app.num_nodes, "node_files": app.node_files}
        print_json(json_value({**facts, "plugin_digest": app.plugin_digest}))
        return
    nodes = f"a Flower app for {app.num_nodes} SuperNodes"
    click.echo(f"{app.path}: {nodes}; see docs/howto/deployment.md")
    if app.plugin_digest is not None:
        click.echo(f"plugin_digests of a node's policy: {app.plugin_digest}")
    for path in app.node_files:
        say(f"not in the app: {path}; copy it to this path on every node")


@click.command("node-policy", short_help="Write or check the policy of a SuperNode in FILE.")
@click.argument("file", type=click.Path())
@click.option("--check", is_flag=True, help="Check FILE and print what it allows.")
@click.option("--plan", metavar="EXPERIMENT", help="Check an experiment against FILE.")
def node_policy_command(file: str, check: bool, plan: str | None) -> None:
    """Write a commented policy for a SuperNode to FILE, or check the one in FILE.

    The policy limits what a server can ask of the node. docs/howto/deployment.md describes it.
    --plan checks the settings and plug-ins of EXPERIMENT and prints the digest of its privacy plan
    for plan_digests; it reads the data, whose sizes are a part of the plan, and runs plug-ins.
    """
    from fedsim.tools.deployment.policy import load_policy, write_template

    path = Path(file)
    if plan is not None:
        from fedsim.experiment import load_experiment
        from fedsim.federation.assembly import assemble
        from fedsim.tools.deployment.policy_rules import check_experiment

        loaded = load_experiment(Path(plan))
        check_experiment(load_policy(path), loaded)
        click.echo(assemble(loaded, ledger=None).plan.digest)
        return
    if not check:
        write_template(path)
        click.echo(f"{path}: a new policy; edit it, then run: fedsim node-policy {path} --check")
        return
    click.echo("\n  ".join([f"{path}: ok", *load_policy(path).lines()]))


def _key_command(owner: str, purpose: str) -> click.Command:
    """Return the command that creates the lasting key of a party of secure aggregation."""
    help_text = f"""
    Create the lasting key of a {owner} of secure aggregation in FILE and print its fingerprint.

    If FILE exists, only the fingerprint of its key is printed. Keep the file on the {owner}'s
    machine, and put the fingerprint into secure_aggregation.keys.{owner}_fingerprints, so that
    {purpose}.
    """
    short = f"Create a {owner}'s key and print its fingerprint."

    @click.command(f"{owner}-key", help=help_text, short_help=short)
    @click.argument("file", type=click.Path())
    @json_option
    def key_command(file: str, as_json: bool) -> None:
        from fedsim.federation.secure_setup import make_lasting_key, read_lasting_key
        from fedsim.secagg.errors import PublicKeyError

        path = Path(file)
        made = not path.exists()
        try:
            key = make_lasting_key(path) if made else read_lasting_key(path)
        except (OSError, PublicKeyError) as error:
            fail(str(error), ExitCode.WRONG_INPUT)
        if as_json:
            print_json({"path": str(path), "fingerprint": key.fingerprint, "made": made})
            return
        click.echo(key.fingerprint)
        if made:
            say(f"{path}: a new key; keep it on the machine of the {owner}")

    return key_command


helper_key_command = _key_command("helper", "clients can pin the key")
client_key_command = _key_command("client", "helpers count only clients that exist")
