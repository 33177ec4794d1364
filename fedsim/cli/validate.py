"""The command `validate`."""

from typing import TYPE_CHECKING

import click

from fedsim.cli.options import json_option, overrides_argument, verbose_option
from fedsim.cli.output import print_json

if TYPE_CHECKING:
    from fedsim.experiment import Experiment


@click.command("validate", short_help="Check the experiment in FILE without running it.")
@click.argument("file", type=click.Path())
@overrides_argument
@verbose_option
@json_option
def validate_command(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the experiment in FILE without running it or importing its plug-ins.

    Lists the code that a run would execute and the files that it would read.
    """
    from fedsim.deployment.plugin_digest import plugin_digest
    from fedsim.experiment import load_experiment
    from fedsim.planning.footprint import find_footprint

    loaded = load_experiment(file, overrides)
    experiment = loaded.experiment
    if as_json:
        print_json(experiment.model_dump(mode="json"))
        return
    click.echo(f"{file}: ok ({experiment.name}, {_privacy_in_words(experiment)})")
    for line in find_footprint(loaded).lines():
        click.echo(line)
    digest = plugin_digest(loaded)
    if digest is not None:
        click.echo(f"  plugin_digests of a node's policy: {digest}")


def _privacy_in_words(experiment: "Experiment") -> str:
    """Return the privacy of an experiment in words; `privacy: null` must be visible here."""
    if experiment.privacy is None:
        return "no differential privacy"
    target = experiment.privacy.target_epsilon
    if target is None:
        return f"DP-SGD with noise multiplier {experiment.privacy.noise_multiplier:g}"
    delta = experiment.privacy.delta
    at = "a δ by client size" if delta == "auto" else f"δ = {delta:g}"
    return f"DP-SGD with target ε = {target:g} at {at}"
