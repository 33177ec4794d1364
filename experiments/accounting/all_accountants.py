"""All accountants of the package side by side on DP-SGD.

Basic, advanced, KOV and optimal composition see a step as one (epsilon, delta) pair, at the best
split of delta; moments and RDP see its Rényi curve; PLD its whole privacy loss. "moments" has whole
orders 2..32 and the older conversion.

Run: python experiments/accounting/all_accountants.py [--out DIR]
"""

import math

from accounting_common import (
    Compose,
    classical_epsilon,
    output_directory,
    save_plot,
    show,
    show_table,
)

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled, RdpAccountant
from fedsim.accountant.textbook.classical import (
    advanced_composition,
    basic_composition,
    kov_composition,
    optimal_composition,
)
from fedsim.accountant.textbook.moments import MOMENTS_ORDERS, log_moments, moments_epsilon

RATE, NOISE, DELTA = 0.01, 1.0, 1e-5
COUNTS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)


def basic(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Returns the sum of epsilons if the sum of deltas fits."""
    total = basic_composition([epsilon] * count, [delta] * count)
    return total[0] if total[1] <= total_delta else math.inf


def advanced(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Returns strong composition with what is left of delta as slack."""
    slack = total_delta - count * delta
    return advanced_composition(epsilon, delta, count, slack)[0] if slack > 0.0 else math.inf


def kov(epsilon: float, delta: float, count: int, total_delta: float) -> float:
    """Returns KOV Theorem 3.4 with the slack that meets 1 - (1-delta)^T (1-slack) = total."""
    slack = -math.expm1(math.log1p(-total_delta) - count * math.log1p(-delta))
    return kov_composition(epsilon, delta, count, slack)[0] if slack > 0.0 else math.inf


def main() -> None:
    """Prints the table and saves all_accountants.png."""
    out = output_directory(__doc__)
    step = PoissonSampled(RATE, Gaussian(NOISE))
    moments = log_moments(RATE, NOISE, MOMENTS_ORDERS)
    pairs: dict[str, Compose] = {
        "basic": basic,
        "advanced": advanced,
        "KOV": kov,
        "optimal": optimal_composition,
    }
    curves = {
        name: [classical_epsilon(compose, RATE, NOISE, count, DELTA) for count in COUNTS]
        for name, compose in pairs.items()
    }
    curves["moments"] = [moments_epsilon(MOMENTS_ORDERS, n * moments, DELTA)[0] for n in COUNTS]
    curves["RDP"] = [RdpAccountant().compose(step, n).get_epsilon(DELTA) for n in COUNTS]
    curves["PLD"] = [PldAccountant().compose(step, n).get_epsilon(DELTA) for n in COUNTS]
    show(f"q = {RATE}, z = {NOISE}, delta = {DELTA}")
    show_table({"steps": COUNTS, **curves})
    save_plot(
        out / "all_accountants.png",
        COUNTS,
        curves,
        title=f"q = {RATE}, z = {NOISE:g}, δ = {DELTA:g}",
        x_label="steps",
        log_x=True,
    )


if __name__ == "__main__":
    main()
