"""The `fedsim` command. Data goes to stdout, messages to stderr.

Nothing heavy is imported before a command needs it: `--help` answers at once.
"""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

import fedsim
from fedsim.audit.command import audit
from fedsim.comparison.command import compare_command
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.core.file_errors import describe_os_error
from fedsim.core.interruption import Interruption
from fedsim.deployment.command import node_policy

if TYPE_CHECKING:
    from fedsim.experiment import Experiment
    from fedsim.runs.replay import Replay
    from fedsim.runs.verification import Verification

EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed: a run, a run of a comparison, or a check of `verify` or `audit`",
    ExitCode.WRONG_INPUT: "the command or the file is wrong; nothing was run",
    ExitCode.BUDGET_FORBIDS: "a privacy budget forbids it",
    ExitCode.INTERRUPTED: "interrupted; to continue, repeat `compare`, or `run` with `--resume`",
    ExitCode.TERMINATED: "terminated by SIGTERM; to continue, as after 130",
}

_overrides = click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fedsim.__version__, prog_name="fedsim")
def cli() -> None:
    """Federated learning with local differential privacy, simulated from one YAML file."""


@cli.command("run")
@click.argument("file", type=click.Path())
@_overrides
@click.option(
    "--out", type=click.Path(), help="Run directory, new or empty. Default: runs/NAME-TIME."
)
@click.option("--resume", is_flag=True, help="Continue the run in --out after its last round.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result, no progress.")
@click.option(
    "--profile", type=click.Path(), help="Write a time profile for speedscope.app (JSON)."
)
@_as_json
@click.pass_obj
def run_command(
    interruption: Interruption | None,
    file: str,
    overrides: tuple[str, ...],
    out: str | None,
    resume: bool,
    quiet: bool,
    profile: str | None,
    as_json: bool,
) -> None:
    """Run the experiment in FILE and write its run directory.

    KEY.PATH=VALUE replaces a key of the file: fedsim run exp.yaml federation.rounds=5 privacy=null
    """
    from fedsim.api import run
    from fedsim.profiling import profile_to
    from fedsim.report.terminal import ProgressObserver, print_result
    from fedsim.runs.directory import RunDirectory
    from fedsim.runs.manifest import root_of
    from fedsim.runs.resume import resume_command
    from fedsim.runs.runner import RunFailedError
    from fedsim.tracking.observer import CheckingObserver

    observer = None if quiet else ProgressObserver()
    if interruption is not None:
        observer = CheckingObserver(interruption.raise_again, observer)
    try:
        with profile_to(None if profile is None else Path(profile), name=file):
            result = run(file, overrides=overrides, out=out, resume=resume, observer=observer)
    except RunFailedError as error:
        go_on = resume_command(file, overrides, error.result.path)
        _fail(f"{error}\nfiles of the run: {error.result.path}; to go on: {go_on}", ExitCode.FAILED)
    except KeyboardInterrupt:
        if resume and out is not None:
            click.echo(f"to go on: {resume_command(file, overrides, Path(out))}", err=True)
        raise
    if as_json:
        directory = RunDirectory(result.path)
        summary = directory.read_json("summary.json")
        _print_json({**summary, "path": str(result.path), "root": root_of(directory)})
    else:
        print_result(RunDirectory(result.path))
    if result.status == "interrupted":
        go_on = resume_command(file, overrides, result.path)
        _fail(f"{result.reason}; to go on: {go_on}", ExitCode.INTERRUPTED)


@cli.command(short_help="Show the privacy spend and noise of FILE, without training.")
@click.argument("file", type=click.Path())
@_overrides
@click.option("--plot", type=click.Path(), help="Write ε over the rounds to a .svg or .png file.")
@click.option(
    "--advise",
    is_flag=True,
    help="Compare other sampling rates, steps, rounds and weights at the same ε; print the lines "
    "to change.",
)
@_as_json
def plan(
    file: str, overrides: tuple[str, ...], plot: str | None, advise: bool, as_json: bool
) -> None:
    """Show the privacy spend and the noise of FILE, without training.

    Exit code 3 if a privacy budget forbids the run.
    """
    from fedsim.experiment import load_experiment

    if advise:
        if plot is not None:
            raise click.UsageError("--plot draws the plan of FILE; call it without --advise")
        _advise(file, overrides, as_json=as_json)
        return
    from fedsim.planning.projection import plan_experiment
    from fedsim.report.terminal import print_plan

    planned = plan_experiment(load_experiment(file, overrides))
    if plot is not None:
        from fedsim.report.plan_plot import write_plan_plot

        write_plan_plot(planned, Path(plot))
    if as_json:
        _print_json(planned.to_json())
    else:
        print_plan(planned)
    if planned.refusal is not None:
        _fail(planned.refusal, ExitCode.BUDGET_FORBIDS)


def _advise(file: str, overrides: tuple[str, ...], *, as_json: bool) -> None:
    from fedsim.experiment import load_experiment
    from fedsim.planning.advice.advice import advise_experiment
    from fedsim.report.advice_table import print_advice

    advice = advise_experiment(load_experiment(file, overrides))
    if as_json:
        _print_json(advice.to_json())
    else:
        print_advice(advice)
    if advice.refusal is not None:
        _fail(advice.refusal, ExitCode.BUDGET_FORBIDS)


@cli.command(short_help="Print the result of RUN and rewrite its report.html.")
@click.argument("directory", metavar="RUN", type=click.Path())
@_as_json
def report(directory: str, as_json: bool) -> None:
    """Print the result of the run directory RUN and rewrite its report.html.

    A run that `fedsim verify` does not find sound gets no page: exit code 1, one line per mismatch.
    The report of an older run has the wording of this version of fedsim.
    """
    from fedsim.report.html import write_report
    from fedsim.report.terminal import print_result
    from fedsim.runs.directory import RunDirectory
    from fedsim.runs.run_lock import hold_run
    from fedsim.runs.verification import verify_run

    run_directory = RunDirectory.open(Path(directory))
    with hold_run(run_directory.path):
        problems = verify_run(run_directory, pages=False).problems
        if not problems:
            write_report(run_directory)
    if problems:
        found = "\n".join(f"{directory}: {problem}" for problem in problems)
        _fail(f"{found}\n{directory}: not sound, so report.html was not written", ExitCode.FAILED)
    origin = run_directory.origin
    if not origin.is_this_version:
        click.echo(
            f"{directory}: written by fedsim {origin.version} (run schema {origin.schema}); the "
            f"privacy statement in report.html has the wording of fedsim {fedsim.__version__}; "
            "`fedsim verify` shows what can be checked",
            err=True,
        )
    if as_json:
        _print_json(
            {
                "summary": run_directory.read_json("summary.json"),
                "privacy": run_directory.read_json("privacy.json"),
            }
        )
    else:
        print_result(run_directory)


@cli.command(short_help="Check every file of RUN, a run or a search; recompute every ε.")
@click.argument("directory", metavar="RUN", type=click.Path())
@click.option(
    "--root", help="Root of manifest.json, as `fedsim run` printed it and you kept it elsewhere."
)
@click.option(
    "--replay",
    is_flag=True,
    help="Run the federation again and compare all that left its clients; imports its plug-ins.",
)
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False),
    help="With --replay: directory of the experiment's relative paths. Default: the current one.",
)
@_as_json
def verify(directory: str, root: str | None, replay: bool, base: str | None, as_json: bool) -> None:
    """Check every file of the run directory RUN and recompute every ε from its ledger.

    The files are compared with manifest.json and with each other. Only --root finds a forger who
    rewrote all of them consistently. Folders of trackers are not covered. Exit code 1 and one line
    per mismatch if a check fails, also for a run that has not ended.

    --replay takes as long as the run. It needs seeded noise, the run's data and plug-ins, its
    version of fedsim, torch and numpy, and its kind of processor: otherwise exit code 2.

    RUN may be the directory of a search (`fedsim compare FILE --select`): both of its figures are
    recomputed from its ledger, and --root is the hash of the last record there.
    """
    from fedsim.comparison.search.verify import is_search
    from fedsim.runs.directory import RunDirectory
    from fedsim.runs.run_lock import refuse_in_use
    from fedsim.runs.verification import verify_run

    if root is not None and not re.fullmatch("[0-9a-fA-F]{64}", root):
        raise click.BadParameter(
            f"must be 64 hexadecimal digits, got {root!r}", param_hint="--root"
        )
    if is_search(Path(directory)):
        if replay:
            raise click.BadParameter("the runs of a search are destroyed", param_hint="--replay")
        _verify_search(directory, root, as_json=as_json)
        return
    run_directory = RunDirectory.open(Path(directory))
    refuse_in_use(run_directory.path)
    found = verify_run(run_directory, root=root)
    replayed = None
    if replay and not found.problems:
        from fedsim.runs.replay import replay_run

        replayed = replay_run(run_directory, base=None if base is None else Path(base))
        found = replace(found, problems=replayed.problems)
    if as_json:
        _print_json(
            {
                "sound": not found.problems,
                "problems": list(found.problems),
                "unchecked": list(found.unchecked),
                "root": found.root,
                **({} if replayed is None else {"replayed": _replayed_numbers(replayed)}),
            }
        )
    elif not found.problems:
        click.echo(f"{directory}: sound ({_spend_in_words(found)})")
        if found.root is not None:
            click.echo(f"root: {found.root}")
        if replayed is not None:
            numbers = ", ".join(f"{n} {what}" for what, n in _replayed_numbers(replayed).items())
            click.echo(f"replayed: {numbers}, all as recorded")
    else:
        click.echo("\n".join(f"{directory}: {problem}" for problem in found.problems), err=True)
    for item in found.unchecked:
        click.echo(f"{directory}: not checked: {item}", err=True)
    if found.problems:
        sys.exit(ExitCode.FAILED)


def _verify_search(directory: str, root: str | None, *, as_json: bool) -> None:
    from fedsim.comparison.search.verify import verify_search

    found = verify_search(Path(directory), root=root)
    if as_json:
        content = {name: value for name, value in vars(found).items() if name != "problems"}
        _print_json({"sound": not found.problems, "problems": list(found.problems), **content})
    elif found.problems:
        click.echo("\n".join(f"{directory}: {problem}" for problem in found.problems), err=True)
    else:
        click.echo(f"{directory}: sound")
        click.echo("\n".join(found.statement))
        click.echo(f"root: {found.root}")
    for item in found.unchecked:
        click.echo(f"{directory}: not checked: {item}", err=True)
    if found.problems:
        sys.exit(ExitCode.FAILED)


def _replayed_numbers(replayed: "Replay") -> dict[str, int]:
    return {
        "rounds": replayed.rounds,
        "uploads": replayed.uploads,
        "charges": replayed.charges,
    }


@cli.command(short_help="Write FILE as a Flower app for SuperNodes.")
@click.argument("file", type=click.Path())
@_overrides
@click.option("--out", type=click.Path(), required=True, help="The app's directory, new or empty.")
@_as_json
def deploy(file: str, overrides: tuple[str, ...], out: str, as_json: bool) -> None:
    """Write FILE as a Flower app for `flwr run`, on a SuperLink and SuperNodes.

    docs/deployment.md describes every step.
    """
    from fedsim.deployment.flower_app import write_app
    from fedsim.experiment import load_experiment

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
    if privacy is not None and privacy.trust == "distributed" and secure is not None:
        for key in ("helper_key_fingerprints", "client_key_fingerprints"):
            if not getattr(secure, key):
                click.echo(
                    f"warning: secure_aggregation.{key} is empty: nothing keeps the server to the "
                    "protocol, so the statement will claim the ε against the server alone",
                    err=True,
                )
    if as_json:
        _print_json(
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


@cli.command("helper-key", short_help="Create a helper's key and print its fingerprint.")
@click.argument("file", type=click.Path())
@_as_json
def helper_key(file: str, as_json: bool) -> None:
    """Create the lasting key of a helper of secure aggregation in FILE and print its fingerprint.

    If FILE exists, only the fingerprint of its key is printed. Keep the file on the helper's
    machine, and put the fingerprint into secure_aggregation.helper_key_fingerprints, so that
    clients can pin the key.
    """
    _lasting_key(Path(file), "helper", as_json=as_json)


@cli.command("client-key", short_help="Create a client's key and print its fingerprint.")
@click.argument("file", type=click.Path())
@_as_json
def client_key(file: str, as_json: bool) -> None:
    """Create the lasting key of a client of secure aggregation in FILE and print its fingerprint.

    If FILE exists, only the fingerprint of its key is printed. Keep the file on the client's
    machine, and put the fingerprint into secure_aggregation.client_key_fingerprints, so that
    helpers count only clients that exist.
    """
    _lasting_key(Path(file), "client", as_json=as_json)


def _lasting_key(path: Path, owner: str, *, as_json: bool) -> None:
    from fedsim.federation.lasting_keys import make_lasting_key, read_lasting_key
    from fedsim.secagg.errors import PublicKeyError

    made = not path.exists()
    try:
        key = make_lasting_key(path) if made else read_lasting_key(path)
    except (OSError, PublicKeyError) as error:
        _fail(str(error), ExitCode.WRONG_INPUT)
    if as_json:
        _print_json({"path": str(path), "fingerprint": key.fingerprint, "made": made})
        return
    click.echo(key.fingerprint)
    if made:
        click.echo(f"{path}: a new key; keep it on the machine of the {owner}", err=True)


@cli.command(short_help="Check the experiment in FILE without running it.")
@click.argument("file", type=click.Path())
@_overrides
@_as_json
def validate(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the experiment in FILE without running it or importing its plug-ins.

    Lists the code that a run would execute and the files that it would read.
    """
    from fedsim.deployment.plugin_digest import plugin_digest
    from fedsim.experiment import load_experiment
    from fedsim.planning.footprint import find_footprint

    loaded = load_experiment(file, overrides)
    experiment = loaded.experiment
    if as_json:
        _print_json(experiment.model_dump(mode="json"))
        return
    click.echo(f"{file}: ok ({experiment.name}, {_privacy_in_words(experiment)})")
    for line in find_footprint(loaded).lines():
        click.echo(line)
    digest = plugin_digest(loaded)
    if digest is not None:
        click.echo(f"  plugin_digests of a node's policy: {digest}")


@cli.command()
def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from fedsim.experiment import json_schema

    _print_json(json_schema())


@cli.command(name="list", short_help="List the built-in names of experiment files.")
@_as_json
def list_names(as_json: bool) -> None:
    """List the built-in datasets, partitions, models, losses and strategies."""
    from fedsim.catalog import catalog

    entries = catalog()
    if as_json:
        _print_json(entries)
        return
    width = max(len(name) for names in entries.values() for name in names)
    for kind, names in entries.items():
        click.echo(click.style(kind, bold=True))
        for name, description in names.items():
            click.echo(f"  {name:<{width}}  {description}")


cli.add_command(audit)
cli.add_command(compare_command)
cli.add_command(node_policy)


def main() -> None:
    """Entry point of the `fedsim` command: each user error becomes one clear message."""
    interruption = Interruption()
    with interruption.handling():
        code = _exit_code(interruption)
        try:
            sys.stdout.flush()
        except OSError as error:  # a full disk, or a reader that left
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  Python flushes it again at its end
            click.echo(f"standard output: {describe_os_error(error)}", err=True)
            code = code or ExitCode.FAILED
    if interruption.received is not None:
        code = interruption.exit_code
    if code:
        sys.exit(code)


def _exit_code(interruption: Interruption) -> int:
    """Run the command of the command line and return its exit code."""
    try:
        cli.main(standalone_mode=False, obj=interruption)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(interruption.reason, err=True)
        return ExitCode.INTERRUPTED
    except FedsimError as error:
        click.echo(str(error), err=True)
        return error.exit_code
    except OSError as error:
        click.echo(describe_os_error(error), err=True)
        return ExitCode.FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return ExitCode.DONE


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


def _spend_in_words(found: "Verification") -> str:
    from fedsim.core.formatting import epsilon_text

    largest = max((client.recomputed for client in found.clients), default=None)
    text = "no privacy was claimed"
    if largest is not None:
        text = f"largest ε = {epsilon_text(largest)}"
    return f"{len(found.clients)} clients recomputed, {text}"


def _fail(message: str, code: int) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
