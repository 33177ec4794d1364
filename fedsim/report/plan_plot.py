"""The planned ε of every client over its rounds, as a picture."""

import math
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsim.planning.projection import Plan
from fedsim.report.svg import Ink, save_figure, style

_INCHES = (6.4, 4.0)


def write_plan_plot(plan: Plan, path: Path) -> None:
    """Write the curves to a file.

    Args:
        plan: the plan of every client.
        path: a .svg, .png or .pdf file.

    Raises:
        InputError: the file has another suffix.
        OSError: the file cannot be written.
    """
    with style():
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for client in plan.clients:
            points = [(rounds, value) for rounds, value in client.curve if math.isfinite(value)]
            if points:
                axes.plot(*zip((0, 0.0), *points, strict=True), color=Ink.ACCENT, alpha=0.5, lw=1.2)
        if plan.target_epsilon is not None:
            axes.axhline(plan.target_epsilon, color=Ink.MUTED, ls="--", lw=1.1)
            axes.annotate(
                "target",
                (0, plan.target_epsilon),
                xytext=(2, 3),
                textcoords="offset points",
                color=Ink.MUTED,
            )
        axes.set_xlabel("rounds that the client took part in")
        axes.set_ylabel(f"ε at δ = {plan.delta:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        save_figure(figure, path, title=f"Planned ε of each client at δ = {plan.delta:g}")
