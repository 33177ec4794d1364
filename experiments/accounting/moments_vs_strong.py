"""Moments accountant against strong composition over epochs (Abadi et al. 2016, figure 2).

Run: python experiments/accounting/moments_vs_strong.py [--out DIR]
"""

import math

import numpy as np
from accounting_common import classical_epsilon, output_directory, save_plot, show, show_table

from fedsim.accountant.textbook.classical import advanced_composition
from fedsim.accountant.textbook.moments import MOMENTS_ORDERS, log_moments, moments_epsilon

RATE, NOISE, DELTA = 0.01, 4.0, 1e-5
EPOCHS = (1, 2, 5, 10, 20, 50, 100, 200, 400)


def strong(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Returns epsilon by the strong composition theorem, with what is left of delta as slack."""
    slack = total_delta - count * delta
    return advanced_composition(epsilon, delta, count, slack)[0] if slack > 0.0 else math.inf


def main() -> None:
    """Prints the table and saves moments_vs_strong.png."""
    out = output_directory(__doc__)
    steps = [round(epochs / RATE) for epochs in EPOCHS]
    per_step = log_moments(RATE, NOISE, MOMENTS_ORDERS)
    curves = {
        "strong": [classical_epsilon(strong, RATE, NOISE, count, DELTA) for count in steps],
        "moments": [moments_epsilon(MOMENTS_ORDERS, n * per_step, DELTA)[0] for n in steps],
    }
    show(f"q = {RATE}, z = {NOISE}, delta = {DELTA}")
    ratio = np.divide(curves["strong"], curves["moments"]).tolist()
    show_table({"epochs": EPOCHS, **curves, "ratio": ratio})
    save_plot(
        out / "moments_vs_strong.png",
        EPOCHS,
        curves,
        title=f"q = {RATE}, z = {NOISE:g}, δ = {DELTA:g}",
        x_label="epochs",
        log_x=True,
    )


if __name__ == "__main__":
    main()
