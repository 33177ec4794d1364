"""The command `fedsim compare`. No slow library is imported before it is called."""

import sys
from collections.abc import Mapping, Sequence
from os.path import exists, isdir  # pathlib's raise where an override is too long for a path
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedsim.cli.options import command_imports, fail, json_option, print_json, refuse_options
from fedsim.cli.registry import OPTIONS
from fedsim.core.errors import ExitCode

if TYPE_CHECKING:
    from fedsim.comparison.comparison_result import ComparisonResult

_OF_RUNS = ("baseline", "metric", "out")


@click.command("compare", short_help="Compare variants of an experiment, or finished runs.")
@click.argument("sources", nargs=-1, required=True, metavar="FILE [KEY.PATH=VALUE]... | RUN RUN...")
@click.option(
    "--vary",
    multiple=True,
    metavar="KEY=V1,V2",
    help="Values to compare of a key of the experiment FILE; several options give every "
    "combination. target_epsilon=null is without privacy.",
)
@click.option(
    "--one-at-a-time",
    is_flag=True,
    help="With --vary: one key at a time, all others as in FILE, instead of every combination.",
)
@click.option("--seeds", metavar="N", help="Number of seeds, or a list: 3,7. Default of --vary: 5.")
@click.option("--baseline", metavar="NAME", help="The variant to compare with. Default: the first.")
@click.option("--metric", metavar="NAME", help="The metric to compare, such as test_loss.")
@click.option(
    "--client-metrics",
    is_flag=True,
    help="Evaluate final models on every client's own data: private figures without any ε.",
)
@click.option(
    "--tune",
    multiple=True,
    metavar="KEY[=V1,V2]",
    help="Tune a key of every variant before the comparison, on other seeds; without values, "
    "around each variant's own value.",
)
@click.option(
    "--tune-on",
    type=click.Choice(["public_test", "public_data"]),
    help="public_test (default): private clients, every candidate is charged; public_data: every "
    "example is public.",
)
@click.option(
    "--out",
    type=click.Path(),
    help="Output directory; an earlier one is continued. Default: runs/NAME, or runs/NAME-search.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of parallel runs. Default: one per processor.",
)
@click.option(
    "--select",
    is_flag=True,
    help="Perform the charged search of FILE: keep one model, destroy all other runs.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print only the result, no progress.")
@json_option
def compare_command(
    sources: tuple[str, ...], *, select: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Compare variants of an experiment with the same seeds, or runs that exist.

    \b
    fedsim compare comparison.yaml
    fedsim compare experiment.yaml --vary privacy.target_epsilon=null,8,2 --seeds 5
    fedsim compare runs/a runs/b runs/c

    A comparison FILE names its variants. With --vary, FILE is an experiment. KEY.PATH=VALUE after
    FILE replaces a key of the experiment for all variants. Finished runs are reused and unfinished
    runs resumed: to continue after an interruption, run the same command again.

    RUN directories are compared without running anything; runs that differ in the seed alone are
    one variant.

    --tune local.optimizer.lr tries several learning rates for every variant, on seeds that are not
    compared, and compares the best of each. The result says whether that was charged.

    --select performs the search that select.search describes: a secret number of runs, drawn and
    charged before the first one, of which the best model alone is kept. It prints two figures, one
    for the server and the clients, and one for an observer of nothing but that model.
    """  # noqa: D301  click keeps the lines after \b
    if any(map(isdir, sources)):
        chosen = {name: options.pop(name) for name in _OF_RUNS}
        refuse_options({**options, "select": select}, "run directories")
        with command_imports(quiet=quiet):
            from fedsim.comparison.compare import compare_runs

        if not quiet:
            click.echo(f"checking {len(sources)} run directories", err=True)
        _print(compare_runs(sources, **chosen), as_json=as_json)
        return
    file, *overrides = sources
    _refuse_other_files(file, overrides)
    if options["one_at_a_time"] and not options["vary"]:
        fix = "a variant of a comparison file has a key one_at_a_time"
        raise click.UsageError(f"--one-at-a-time needs --vary; {fix}")
    if options["tune_on"] and not options["tune"]:
        raise click.UsageError("--tune-on needs --tune KEY; in a file, write tune: {on: ...}")
    if select:
        if overrides:
            fix = "write it in the experiment that base: names"
            raise click.UsageError(f"{overrides[0]!r} does not go with --select; {fix}")
        places = {"out": options.pop("out"), "workers": options.pop("workers")}
        refuse_options(options, "--select")
        OPTIONS["compare --select"](file, **places, quiet=quiet, as_json=as_json)
        return
    _compare_variants(file, overrides, options, quiet=quiet, as_json=as_json)


def _compare_variants(
    file: str, overrides: Sequence[str], options: Mapping[str, Any], *, quiet: bool, as_json: bool
) -> None:
    with command_imports(quiet=quiet):
        from fedsim.comparison.compare import compare as run_comparison
        from fedsim.comparison.results import NothingFinishedError
        from fedsim.comparison.terminal import ComparisonProgress
        from fedsim.comparison.vary import parse_tune, parse_vary

    given = {
        **options,
        "vary": parse_vary(options["vary"]),
        "seeds": _seeds(options["seeds"]),
        "client_metrics": options["client_metrics"] or None,
        "tune": parse_tune(options["tune"]),
    }
    callback = None if quiet else ComparisonProgress()
    try:
        result = run_comparison(file, **given, overrides=overrides, callback=callback)
    except NothingFinishedError as error:
        fail(str(error), ExitCode.FAILED)
    _print(result, as_json=as_json)
    for run in result.failed:
        click.echo(f"{run.path}: {run.reason}", err=True)
    if result.interrupted:
        fail("interrupted; run the same command again to continue", ExitCode.INTERRUPTED)
    if result.failed:
        sys.exit(ExitCode.FAILED)


def _print(result: "ComparisonResult", *, as_json: bool) -> None:
    from fedsim.comparison.terminal import print_comparison

    if as_json:
        print_json({**result.to_json(), "path": str(result.path)})
    else:
        print_comparison(result)


def _refuse_other_files(file: str, overrides: Sequence[str]) -> None:
    """Refuse arguments other than one file and its overrides; the message names the fix."""
    for text in overrides:
        if "=" not in text or exists(text):
            fix = "compare one FILE, or several RUN directories"
            raise click.UsageError(f"{text!r} is no run directory; {fix}")
    if not exists(file) and not Path(file).suffix:
        raise click.UsageError(f"{file!r} does not exist; name a FILE, or several RUN directories")


def _seeds(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        rule = f"--seeds must be a number of seeds, or a list such as 3,7, got {text!r}"
        raise click.UsageError(rule) from error
    return numbers if "," in text else numbers[0]
