"""The `fedsim node-policy` command. Nothing heavy is imported before it is called."""

from pathlib import Path

import click


@click.command("node-policy", short_help="Write or check the policy of a SuperNode in FILE.")
@click.argument("file", type=click.Path())
@click.option("--check", is_flag=True, help="Check FILE and print what it allows.")
@click.option("--plan", metavar="EXPERIMENT", help="Check an experiment against FILE.")
def node_policy_command(file: str, check: bool, plan: str | None) -> None:
    """Write a commented policy for a SuperNode to FILE, or check the one in FILE.

    The policy limits what a server can ask of the node. docs/deployment.md describes it. --plan
    checks the settings and plug-ins of EXPERIMENT and prints the digest of its privacy plan for
    plan_digests; it reads the data, whose sizes are a part of the plan, and runs plug-ins.
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
    policy = load_policy(path)
    click.echo(f"{path}: ok")
    for line in policy.lines():
        click.echo(f"  {line}")
