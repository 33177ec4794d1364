"""Factors of correlated noise by jax_privacy, for the table of `tests/noise/correlated`.

    python benchmarks/matrix_factors.py

Needs jax_privacy (2.0.0), in an environment of its own. Prints, for rounds n, min separation b and
buffers, the sensitivity and the root mean square error of prefix sums of the optimised BLT; and for
bands, those of the square root of the prefix-sum matrix in a band, and of the optimised band. An
optimisation takes half a minute on one core.
"""

import math

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax_privacy.matrix_factorization import buffered_toeplitz, optimization, toeplitz  # pyright: ignore[reportMissingImports]

ROUNDS, SEPARATIONS, BUFFERS = (1024, 2000), (100, 200, 400), (2, 3, 4, 5)


@optimization.jax_enable_x64
def figures(coefficients: jnp.ndarray, rounds: int, separation: int) -> tuple[float, float]:
    """Return (sensitivity, root mean square error) of Toeplitz coefficients."""
    squared = toeplitz.minsep_sensitivity_squared(coefficients, separation, n=rounds)
    errors = toeplitz.per_query_error(strategy_coef=coefficients, n=rounds)
    return math.sqrt(float(squared)), math.sqrt(float(jnp.mean(errors)))


def main() -> None:
    """Print one line for each strategy."""
    for rounds in ROUNDS:
        for separation in SEPARATIONS:
            bands = min(separation, 128)
            root = toeplitz.optimal_max_error_strategy_coefs(bands)
            print("band", rounds, separation, bands, *figures(root, rounds, separation))
            best = toeplitz.optimize_banded_toeplitz(rounds, bands)
            print("best band", rounds, separation, bands, *figures(best, rounds, separation))
            for buffers in BUFFERS:
                blt = buffered_toeplitz.optimize(
                    n=rounds,
                    min_sep=separation,
                    max_participations=-(-rounds // separation),
                    error="mean",
                    min_buffers=buffers,
                    max_buffers=buffers,
                )
                column = blt.toeplitz_coefs(rounds)
                print("blt", rounds, separation, buffers, *figures(column, rounds, separation))


if __name__ == "__main__":
    main()
