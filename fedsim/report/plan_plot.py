"""The planned ε of every client over its rounds, as a picture."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from fedsim.planning.projection import Plan
from fedsim.runs.directory import RunDirectoryError


def write_plan_plot(plan: Plan, path: Path) -> None:
    """Write the curves to a file.

    Args:
        plan: the plan of every client.
        path: a .svg or .png file.

    Raises:
        RunDirectoryError: the file has another suffix.
    """
    if path.suffix not in (".svg", ".png"):
        raise RunDirectoryError(f"--plot writes .svg or .png files, got {path.name}")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for client in plan.clients:
        points = [(rounds, value) for rounds, value in client.curve if math.isfinite(value)]
        if points:
            axes.plot(*zip((0, 0.0), *points, strict=True), color="#1f5fbf", alpha=0.5, lw=1.2)
    if plan.target_epsilon is not None:
        axes.axhline(plan.target_epsilon, color="#444444", ls="--", lw=1)
        axes.annotate("target", (0, plan.target_epsilon), xytext=(2, 3), textcoords="offset points")
    axes.set_xlabel("rounds that the client took part in")
    axes.set_ylabel(f"ε at δ = {plan.delta:g}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
