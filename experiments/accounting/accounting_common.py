"""What the accounting scripts share: the classical route for DP-SGD, a table, a plot."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from fedsim.accountant.gaussian import gaussian_epsilon
from fedsim.accountant.textbook.classical import subsample_amplification

mpl.use("Agg")  # draws into files: needs no display
import matplotlib.pyplot as plt

# How much of delta the steps themselves get; the rest is the composition theorem's slack.
SHARES = np.concatenate((np.logspace(-9, -1, 17), [0.3, 0.5, 0.7, 0.9, 0.999]))

Compose = Callable[[float, float, int, float], float]


def output_directory(description: str | None, arguments: Sequence[str] | None = None) -> Path:
    """Returns the directory of `--out`, made if it is missing; the current one by default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(), help="directory for the plot")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    return out


def classical_epsilon(compose: Compose, q: float, z: float, steps: int, delta: float) -> float:
    """Returns epsilon of DP-SGD by composing (epsilon, delta) pairs, the best over splits of delta.

    A step gets delta0 on its sample, so epsilon0 by the exact Gaussian; sampling turns that into
    (log(1 + q (e^epsilon0 - 1)), q delta0); `compose(epsilon, delta, steps, total delta)` does the
    rest.
    """
    best = np.inf
    for share in SHARES:
        step_delta = min(0.999, share * delta / (steps * q))
        pair = subsample_amplification(gaussian_epsilon(1.0 / z, step_delta), step_delta, q)
        best = min(best, compose(*pair, steps, delta))
    return float(best)


def show(text: str) -> None:
    """Writes one line to standard output."""
    sys.stdout.write(text + "\n")


def show_table(columns: Mapping[str, Sequence[float]]) -> None:
    """Writes the columns under their names, four significant digits."""
    width = max(12, *(len(name) + 2 for name in columns))
    show("".join(name.rjust(width) for name in columns))
    for row in zip(*columns.values(), strict=True):
        show("".join(f"{value:.4g}".rjust(width) for value in row))


def save_plot(
    path: Path,
    xs: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str = "ε",
    log_x: bool = False,
    log_y: bool = True,
) -> None:
    """Saves one line for each curve over common xs, as the format of the path's suffix."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, ys in curves.items():
        axes.plot(xs, ys, marker=".", label=name)
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.set_xscale("log" if log_x else "linear")
    axes.set_yscale("log" if log_y else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
    show(f"plot: {path}")
