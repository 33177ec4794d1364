"""RDP of sampling without replacement: upper and lower bounds, the good and the bad case.

Replace-one adjacency; z is the noise over C, so the formulas run at z / 2. The two "CLT" curves are
the approximations of Wang, Balle, Kasiviswanathan 2019, examples 19 and 20; the bad one's infinity
is an artefact of the approximation.

Run: python experiments/accounting/subsampled_bounds.py [--out DIR]
"""

import math

import numpy as np
from accounting_common import output_directory, save_plot, show, show_table

from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.without_replacement import (
    rdp_without_replacement,
    rdp_without_replacement_lower_bound,
    rdp_without_replacement_published,
    rdp_without_replacement_tightened,
)
from fedsim.accountant.textbook.renyi import bad_case_rdp, bad_case_rdp_clt, good_case_rdp_clt

SAMPLE, DATASET, NOISE, STEPS, DELTA = 100, 1001, 10.0, 1000, 1e-5
ORDERS = tuple(float(order) for order in (*range(2, 17), 20, 24, 28, 32, 48, 64, 96, 128))


def main() -> None:
    """Prints the table and saves subsampled_bounds.png."""
    out = output_directory(__doc__)
    rate = SAMPLE / DATASET
    curves = {
        "published": rdp_without_replacement_published(rate, NOISE, ORDERS),
        "tightened": rdp_without_replacement_tightened(rate, NOISE, ORDERS),
        "dominating": rdp_without_replacement(rate, NOISE, ORDERS),
        "lower": rdp_without_replacement_lower_bound(rate, NOISE, ORDERS),
        "bad": bad_case_rdp(rate, NOISE, ORDERS),
        "bad CLT": bad_case_rdp_clt(rate, NOISE, ORDERS),
        "good CLT": good_case_rdp_clt(SAMPLE, DATASET, NOISE, ORDERS),
    }
    show(f"m = {SAMPLE} of n = {DATASET}, z = {NOISE}: RDP of one step")
    show_table({"order": ORDERS, **{name: list(values) for name, values in curves.items()}})
    show(f"epsilon of T = {STEPS} steps at delta = {DELTA}")
    bounds = ("published", "tightened", "dominating", "lower")
    totals = {name: [epsilon_from_rdp(ORDERS, STEPS * curves[name], DELTA)[0]] for name in bounds}
    show_table(totals)
    save_plot(
        out / "subsampled_bounds.png",
        ORDERS,
        {
            name: np.where(np.isinf(values), math.nan, values).tolist()
            for name, values in curves.items()
            if name != "lower"  # the same as the bad case
        },
        title=f"m = {SAMPLE} of n = {DATASET}, z = {NOISE:g}, replace-one",
        x_label="order",
        y_label="RDP of one step",
        log_x=True,
    )


if __name__ == "__main__":
    main()
