"""The command `fedsim validate`."""

from typing import TYPE_CHECKING, Any

import click

from fedsim.cli.options import (
    command_imports,
    json_option,
    overrides_argument,
    print_json,
    verbose_option,
)

if TYPE_CHECKING:
    from fedsim.experiment import Experiment, LoadedExperiment


@click.command("validate", short_help="Check the experiment in FILE without running it.")
@click.argument("file", type=click.Path())
@overrides_argument
@verbose_option
@click.option(
    "--data",
    "with_data",
    is_flag=True,
    help="Also load data, model and plug-ins and make every check that a run makes before round 1.",
)
@json_option
def validate_command(file: str, overrides: tuple[str, ...], with_data: bool, as_json: bool) -> None:
    """Check the experiment in FILE without running it or importing its plug-ins.

    Lists the code that a run would execute and the files that it would read. With --data this code
    is executed and these files are read, and the last lines describe the data.
    """
    with command_imports():
        from fedsim.experiment import load_experiment
        from fedsim.planning.validation import find_footprint, plugin_digest

    loaded = load_experiment(file, overrides)
    content, lines = loaded.experiment.model_dump(mode="json"), list[str]()
    if with_data:
        content, lines = _findings(loaded)
    if as_json:
        print_json(content)
        return
    click.echo(f"{file}: ok ({loaded.experiment.name}, {_privacy_in_words(loaded.experiment)})")
    for line in find_footprint(loaded).lines():
        click.echo(line)
    digest = plugin_digest(loaded)
    if digest is not None:
        click.echo(f"  plugin_digests of a node's policy: {digest}")
    for line in lines:
        click.echo(f"  {line}")


def _findings(loaded: "LoadedExperiment") -> tuple[dict[str, Any], list[str]]:
    """Return the facts about the data of an experiment as a JSON value, and as lines of text."""
    with command_imports():
        from fedsim.planning.validation import check_data
        from fedsim.report.progress import headline, notes, shown_phases, warnings

    with shown_phases() as phases:
        findings = check_data(loaded, phases=phases)
    told, warned = notes(findings.federation), warnings(findings.federation)
    lines = [*headline(findings.federation), *findings.lines()]
    lines += [*(f"note: {text}" for text in told), *(f"warning: {text}" for text in warned)]
    return {**findings.to_json(), "notes": told, "warnings": warned}, lines


def _privacy_in_words(experiment: "Experiment") -> str:
    """Return the privacy of an experiment in words; `privacy: null` must be visible here."""
    if experiment.privacy is None:
        return "no differential privacy"
    if not experiment.privacy.adds_noise:
        return "no differential privacy: clipping without noise, ε = ∞"
    target, rho = experiment.privacy.target_epsilon, experiment.privacy.accountant.target_rho
    releases = experiment.release_kind.releases
    if rho is not None:
        return f"{releases} with target ρ = {rho:g}"
    if target is None:
        return f"{releases} with noise multiplier {experiment.privacy.noise_multiplier:g}"
    delta = experiment.privacy.delta
    at = "a δ by client size" if delta == "auto" else f"δ = {delta:g}"
    return f"{releases} with target ε = {target:g} at {at}"
