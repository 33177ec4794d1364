"""ε against the number of steps by several bounds, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from fedsim.core.formatting import count_text, epsilon_text
from fedsim.planning.bounds import BoundCurve
from fedsim.report.line_plot import LinePlot, write_line_plot


def write_bounds_plot(
    curve: BoundCurve, path: Path, *, marks: Sequence[int] | None = None, whose: str = ""
) -> None:
    """Write the curves of all bounds to a file, each with its ε after all steps.

    Args:
        curve: ε at ascending numbers of steps.
        path: a .svg, .png or .pdf file.
        marks: numbers of steps to mark; None: all.
        whose: who takes the steps, in words; "" where the settings were given.

    Raises:
        InputError: the path has another suffix.
        OSError: the file cannot be written.
    """
    steps = [steps for steps, _ in curve.points]
    lines = {
        f"{bound.label} {epsilon_text(last)}": [epsilons[index] for _, epsilons in curve.points]
        for index, (bound, last) in enumerate(zip(curve.bounds, curve.last, strict=True))
        if last is not None
    }
    settings = f"{whose}: {curve.schedule.text}" if whose else curve.schedule.text
    plot = LinePlot(
        title=f"{settings}\nbeside each line: ε after {count_text(steps[-1], 'step')}",
        x_label="steps",
        y_label="ε",
        xs=steps,
        lines=lines,
        log_x=steps[-1] >= 10 * steps[0],
        marks=marks,
    )
    write_line_plot(plot, path)
