"""Moments accountant against strong composition over epochs (Abadi et al. 2016, figure 2).

Run: python experiments/accounting/moments_vs_strong.py [--help]
"""

import argparse

import numpy as np
from accounting_common import add_options, numbers, run, save_plot, show, show_table

from fedsim.accountant.textbook.bounds import choose_bounds
from fedsim.planning.bounds import bound_curve, given_schedule
from fedsim.report.plots import line_chart

EPOCHS = (1, 2, 5, 10, 20, 50, 100, 200, 400)


def main(given: argparse.Namespace) -> None:
    """Prints the table and saves moments_vs_strong.png."""
    epochs = sorted(set(given.epochs))
    steps = [max(1, round(number / given.sampling_rate)) for number in epochs]
    schedule = given_schedule(
        sampling_rate=given.sampling_rate,
        noise_multiplier=given.noise_multiplier,
        delta=given.delta,
        steps=steps[-1],
    )
    curve = bound_curve(schedule, choose_bounds(("strong", "moments")), steps)
    table = np.array([epsilons for _, epsilons in curve.points], dtype=float)
    lines = {"strong": table[:, 0].tolist(), "moments": table[:, 1].tolist()}
    show(f"q = {given.sampling_rate}, z = {given.noise_multiplier}, delta = {given.delta}")
    show_table({"epochs": epochs, **lines, "ratio": (table[:, 0] / table[:, 1]).tolist()})
    plot = line_chart(lines, epochs, schedule.text, "epochs", "ε")
    save_plot(given, "moments_vs_strong", plot)


def options() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description="Moments against strong composition.")
    parser.add_argument("-q", "--sampling-rate", type=float, default=0.01)
    parser.add_argument("-z", "--noise-multiplier", type=float, default=4.0)
    parser.add_argument("--epochs", type=numbers(float), default=EPOCHS, help="steps times q")
    parser.add_argument("--delta", type=float, default=1e-5)
    add_options(parser)
    return parser


if __name__ == "__main__":
    run(main, options())
