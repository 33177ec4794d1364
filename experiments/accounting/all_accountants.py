"""All bounds of the package side by side on DP-SGD.

Basic, strong, KOV and optimal composition see a step as one (epsilon, delta) pair, at the best
split of delta; moments and RDP see its Rényi curve; PLD its whole privacy loss. "moments" has whole
orders 2..32 and the older conversion. `fedsim curve` prints the same columns.

Run: python experiments/accounting/all_accountants.py [--help]
"""

import argparse

from accounting_common import add_options, numbers, run, save_plot, show, show_table

from fedsim.accountant.textbook.bounds import BOUNDS, choose_bounds
from fedsim.planning.bounds import bound_curve, given_schedule
from fedsim.report.plots import line_chart

COUNTS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)


def main(given: argparse.Namespace) -> None:
    """Prints the table and saves all_accountants.png."""
    schedule = given_schedule(
        sampling_rate=given.sampling_rate,
        noise_multiplier=given.noise_multiplier,
        delta=given.delta,
        steps=max(given.steps),
    )
    curve = bound_curve(schedule, choose_bounds(given.bounds.split(",")), given.steps)
    counts = [count for count, _ in curve.points]
    lines = {
        bound.label: [epsilons[place] for _, epsilons in curve.points]
        for place, bound in enumerate(curve.bounds)
    }
    show(f"q = {given.sampling_rate}, z = {given.noise_multiplier}, delta = {given.delta}")
    show_table({"steps": counts, **lines})
    plot = line_chart(lines, counts, schedule.text, "steps", "ε")
    save_plot(given, "all_accountants", plot)


def options() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description="Bounds on epsilon side by side.")
    parser.add_argument("-q", "--sampling-rate", type=float, default=0.01)
    parser.add_argument("-z", "--noise-multiplier", type=float, default=1.0)
    parser.add_argument("-T", "--steps", type=numbers(int), default=COUNTS)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--bounds", default=",".join(BOUNDS), help="names, separated by commas")
    add_options(parser)
    return parser


if __name__ == "__main__":
    run(main, options())
