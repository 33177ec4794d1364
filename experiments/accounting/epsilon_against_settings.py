"""Epsilon of DP-SGD against the sampling rate q, the noise multiplier z and the steps T.

Run: python experiments/accounting/epsilon_against_settings.py [--help]
"""

import argparse

from accounting_common import add_options, numbers, run, save_plot, show, show_table

from fedsim.accountant.textbook.bounds import Bound, choose_bounds
from fedsim.planning.bounds import bound_curve, given_schedule
from fedsim.report.plots import line_chart

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
NOISES = (0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
COUNTS = (10, 30, 100, 300, 1000, 3000, 10000)


def epsilon(bound: Bound, setting: tuple[float, float, int], delta: float) -> float | None:
    """Returns epsilon of T steps of DP-SGD, setting = (q, z, T)."""
    rate, noise, steps = setting
    schedule = given_schedule(sampling_rate=rate, noise_multiplier=noise, delta=delta, steps=steps)
    return bound_curve(schedule, [bound]).last[0]


def main(given: argparse.Namespace) -> None:
    """Prints three tables and saves epsilon_against_{q,z,T}.png."""
    q, z, steps = given.sampling_rate, given.noise_multiplier, given.steps
    bounds = choose_bounds(given.bounds.split(","))
    show(f"unless varied: q = {q}, z = {z}, T = {steps}; delta = {given.delta}")
    sweeps = {
        "q": {rate: (rate, z, steps) for rate in sorted(given.rates)},
        "z": {noise: (q, noise, steps) for noise in sorted(given.noises)},
        "T": {count: (q, z, count) for count in sorted(given.counts)},
    }
    for name, settings in sweeps.items():
        lines = {
            bound.label: [epsilon(bound, one, given.delta) for one in settings.values()]
            for bound in bounds
        }
        show_table({name: list(settings), **lines})
        plot = line_chart(lines, list(settings), f"δ = {given.delta:g}", name, "ε")
        save_plot(given, f"epsilon_against_{name}", plot)


def options() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description="Epsilon against q, z and T.")
    parser.add_argument("-q", "--sampling-rate", type=float, default=0.01)
    parser.add_argument("-z", "--noise-multiplier", type=float, default=1.0)
    parser.add_argument("-T", "--steps", type=int, default=1000)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--rates", type=numbers(float), default=RATES, help="values of q")
    parser.add_argument("--noises", type=numbers(float), default=NOISES, help="values of z")
    parser.add_argument("--counts", type=numbers(int), default=COUNTS, help="values of T")
    parser.add_argument("--bounds", default="rdp,pld", help="names, separated by commas")
    add_options(parser)
    return parser


if __name__ == "__main__":
    run(main, options())
