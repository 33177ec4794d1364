"""The command `fedsim curve`, which compares bounds on ε over the steps of DP-SGD."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedsim.cli.options import (
    bounds_option,
    command_imports,
    json_option,
    overrides_argument,
    print_json,
    refuse_options,
)
from fedsim.core.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.planning.bounds import BoundCurve

_PLOT_POINTS = 40
_KIND_POINTS = 12  # of the curve of each kind of clients
_DELTA = 1e-5
_MAX_STEPS = 10**9
_SETTINGS = {
    "sampling_rate": "-q/--sampling-rate",
    "noise_multiplier": "-z/--noise-multiplier",
    "steps": "-T/--steps",
}


def _step_numbers(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    """Return ascending numbers of steps; a range gives 1, 2, 5, 10, 20, ... inside it."""
    if text is None:
        return None
    first, dots, last = text.partition("..")
    try:
        numbers = [int(first or 1), int(last)] if dots else list(map(int, text.split(",")))
    except ValueError:
        rule = "must be a number, numbers such as 10,100, or a range 10..1000"
        raise click.BadParameter(f"{text!r} {rule}") from None
    if not all(1 <= number <= _MAX_STEPS for number in numbers):
        raise click.BadParameter(f"{text!r} must be numbers of steps from 1 to {_MAX_STEPS:,}")
    if not dots:
        return tuple(sorted(set(numbers)))
    if numbers[0] > numbers[1]:
        raise click.BadParameter(f"{text!r} must be a range from the smaller to the larger number")
    return round_numbers(*numbers)


def round_numbers(first: int, last: int) -> tuple[int, ...]:
    """Return `first`, `last` and all numbers 1, 2, 5, 10, 20, ... between them, ascending."""
    ticks = (tick * 10**power for power in range(len(str(last))) for tick in (1, 2, 5))
    return tuple(sorted({first, last, *(tick for tick in ticks if first < tick < last)}))


def _orders(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[float, ...] | None:
    """Return Rényi orders as numbers; the accountant checks their range later."""
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise click.BadParameter(f"{text!r} must be numbers above 1, such as 2,4,8") from None


@click.command("curve", short_help="Compare bounds on ε over the steps of DP-SGD.")
@click.argument("file", type=click.Path(), required=False)
@overrides_argument
@click.option("-q", "--sampling-rate", type=float, help="Sampling rate q, in (0, 1].")
@click.option("-z", "--noise-multiplier", type=float, help="Noise multiplier z.")
@click.option(
    "-T",
    "--steps",
    callback=_step_numbers,
    metavar="N | N,N | N..N",
    help="Numbers of steps; ..N is 1, 2, 5, 10, 20, ... up to N.",
)
@click.option("--delta", type=float, help="δ of every ε.  [default: 1e-5]")
@click.option("--orders", callback=_orders, metavar="A,A", help="Rényi orders of the bound rdp.")
@bounds_option(is_always=True, words="Bounds to compare")
@click.option("--csv", "csv_path", type=click.Path(), help="Write the numbers to a .csv file.")
@click.option("--plot", type=click.Path(), help="Write the curves to a .svg, .png or .pdf file.")
@json_option
def curve_command(
    file: str | None,
    overrides: tuple[str, ...],
    *,
    bounds: tuple[str, ...],
    orders: tuple[float, ...] | None,
    csv_path: str | None,
    plot: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare bounds on ε over the steps of DP-SGD.

    \b
    fedsim curve -q 0.01 -z 4 -T ..40000 --delta 1e-5 --plot curve.svg
    fedsim curve experiment.yaml privacy.target_epsilon=2

    Without FILE, a step is Poisson sampling at rate q and a Gaussian release with noise multiplier
    z. With FILE, q, z, T and δ are those of each kind of clients of the experiment.
    """  # noqa: D301  click keeps the lines after \b
    with command_imports():
        from fedsim.experiment import load_experiment
        from fedsim.planning.projection import experiment_curves
        from fedsim.report.drawing import ChartFigure, check_chart_path
        from fedsim.report.plan_terminal import bounds_csv, print_bound_curve, print_client_kinds
        from fedsim.report.progress import shown_phases

    path = None if plot is None else check_chart_path(Path(plot))
    marks, whose = None, ""
    try:
        if file is None:
            curve, drawn = _of_settings(settings, bounds, orders, is_drawn=path is not None)
            curves, marks = (curve,), [steps for steps, _ in curve.points]
        else:
            given = {**settings, "orders": orders}
            refuse_options(
                {name: value is not None for name, value in given.items()},
                "FILE, which sets it; change a key of FILE with KEY.PATH=VALUE",
            )
            loaded = load_experiment(file, overrides)
            points = _KIND_POINTS if as_json or csv_path or path else 1
            with shown_phases() as phases:
                curves = experiment_curves(loaded, bounds, points=points, phases=phases)
            drawn = max(curves, key=lambda curve: curve.smallest, default=None)
            whose = "" if drawn is None else _clients(drawn, len(curves))
    except FedsimError:
        raise
    except ValueError as error:  # about a number
        raise click.UsageError(str(error)) from error
    if csv_path is not None:
        Path(csv_path).write_text(bounds_csv(curves), encoding="utf-8")
    if path is not None and drawn is not None:
        from fedsim.report.plots import bounds_chart

        ChartFigure(bounds_chart(drawn, dotted=marks, whose=whose)).save(path)
    if as_json:
        print_json({"bounds": list(bounds), "curves": [curve.to_json() for curve in curves]})
    elif file is None:
        print_bound_curve(curves[0])
    else:
        print_client_kinds(curves)


def _of_settings(
    settings: dict[str, Any],
    bounds: tuple[str, ...],
    orders: tuple[float, ...] | None,
    *,
    is_drawn: bool,
) -> "tuple[BoundCurve, BoundCurve]":
    """Return (curve at the given steps, curve with more points for the plot)."""
    from fedsim.accountant.textbook.bounds import choose_bounds
    from fedsim.planning.bounds import bound_curve, even_numbers, given_schedule
    from fedsim.report.progress import shown_phases

    missing = [option for name, option in _SETTINGS.items() if settings[name] is None]
    if missing:
        raise click.UsageError(f"give {', '.join(missing)}, or the FILE of an experiment")
    steps: tuple[int, ...] = settings["steps"]
    delta = _DELTA if settings["delta"] is None else settings["delta"]
    schedule = given_schedule(**{**settings, "delta": delta, "steps": steps[-1]})
    chosen = choose_bounds(bounds, orders=orders)
    with shown_phases() as phases:
        phases.begin("bounding ε")
        curve = bound_curve(schedule, chosen, steps)
        if not is_drawn:
            return curve, curve
        first = 1 if len(steps) == 1 else steps[0]
        drawn = (*steps, *even_numbers(first, steps[-1], _PLOT_POINTS))
        return curve, bound_curve(schedule, chosen, drawn)


def _clients(curve: "BoundCurve", kinds: int) -> str:
    clients = curve.schedule.clients
    who = f"client {clients[0]}" if len(clients) == 1 else f"{len(clients):,} clients"
    return f"{who} with the largest ε" if kinds > 1 else who
