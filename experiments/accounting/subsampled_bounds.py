"""RDP of sampling without replacement: upper and lower bounds, the good and the bad case.

Replace-one adjacency; z is the noise over C, so the formulas run at z / 2. The two "CLT" curves are
the approximations of Wang, Balle, Kasiviswanathan 2019, examples 19 and 20; the bad one's infinity
is an artefact of the approximation.

Run: python experiments/accounting/subsampled_bounds.py [--help]
"""

import argparse

from accounting_common import add_options, numbers, run, save_plot, show, show_table
from published_curves import (
    bad_case_rdp_clt,
    good_case_rdp_clt,
    rdp_lower_bound,
    rdp_published,
    rdp_tightened,
)

from fedsim.accountant.rdp.conversion import epsilon_from_rdp
from fedsim.accountant.rdp.without_replacement import rdp_without_replacement
from fedsim.report.plots import line_chart

ORDERS = tuple(float(order) for order in (*range(2, 17), 20, 24, 28, 32, 48, 64, 96, 128))


def main(given: argparse.Namespace) -> None:
    """Prints the table and saves subsampled_bounds.png."""
    noise, orders, rate = given.noise_multiplier, given.orders, given.sample / given.dataset
    bad = rdp_lower_bound(rate, noise, orders)
    curves = {
        "published": rdp_published(rate, noise, orders),
        "tightened": rdp_tightened(rate, noise, orders),
        "dominating": rdp_without_replacement(rate, noise, orders),
        "lower": bad,
        "bad": bad,
        "bad CLT": bad_case_rdp_clt(rate, noise, orders),
        "good CLT": good_case_rdp_clt(given.sample, given.dataset, noise, orders),
    }
    settings = f"m = {given.sample} of n = {given.dataset}, z = {noise}"
    show(f"{settings}: RDP of one step")
    show_table({"order": orders, **{name: list(values) for name, values in curves.items()}})
    show(f"epsilon of T = {given.steps} steps at delta = {given.delta}")
    totals = {
        name: [epsilon_from_rdp(orders, given.steps * curves[name], given.delta)[0]]
        for name in ("published", "tightened", "dominating", "lower")
    }
    show_table(totals)
    plot = line_chart(
        {name: list(values) for name, values in curves.items() if name != "lower"},  # as bad
        orders,
        f"{settings}, replace-one",
        "order",
        "RDP of one step",
    )
    save_plot(given, "subsampled_bounds", plot)


def options() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description="RDP of sampling without replacement.")
    parser.add_argument("-m", "--sample", type=int, default=100, help="examples in a batch")
    parser.add_argument("-n", "--dataset", type=int, default=1001, help="all examples, odd")
    parser.add_argument("-z", "--noise-multiplier", type=float, default=10.0)
    parser.add_argument("-T", "--steps", type=int, default=1000)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--orders", type=numbers(float), default=ORDERS)
    add_options(parser)
    return parser


if __name__ == "__main__":
    run(main, options())
