"""Epsilon of DP-SGD against the sampling rate q, the noise multiplier z and the steps T.

Run: python experiments/accounting/epsilon_against_settings.py [--out DIR]
"""

from accounting_common import output_directory, save_plot, show, show_table

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled, RdpAccountant

RATE, NOISE, STEPS, DELTA = 0.01, 1.0, 1000, 1e-5
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
NOISES = (0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
COUNTS = (10, 30, 100, 300, 1000, 3000, 10000)


def epsilon(
    kind: type[RdpAccountant] | type[PldAccountant], setting: tuple[float, float, int]
) -> float:
    """Returns epsilon of T steps of DP-SGD, setting = (q, z, T)."""
    rate, noise, count = setting
    return kind().compose(PoissonSampled(rate, Gaussian(noise)), count).get_epsilon(DELTA)


def main() -> None:
    """Prints three tables and saves epsilon_against_{q,z,T}.png."""
    out = output_directory(__doc__)
    show(f"unless varied: q = {RATE}, z = {NOISE}, T = {STEPS}; delta = {DELTA}")
    sweeps = {
        "q": (RATES, [(rate, NOISE, STEPS) for rate in RATES]),
        "z": (NOISES, [(RATE, noise, STEPS) for noise in NOISES]),
        "T": (COUNTS, [(RATE, NOISE, count) for count in COUNTS]),
    }
    for name, (values, settings) in sweeps.items():
        curves = {
            "RDP": [epsilon(RdpAccountant, setting) for setting in settings],
            "PLD": [epsilon(PldAccountant, setting) for setting in settings],
        }
        show_table({name: values, **curves})
        save_plot(
            out / f"epsilon_against_{name}.png",
            values,
            curves,
            title=f"ε against {name}, δ = {DELTA:g}",
            x_label=name,
            log_x=True,
        )


if __name__ == "__main__":
    main()
