"""Factors of correlated noise by jax_privacy, for the tables of `tests/noise/correlated`.

    python benchmarks/matrix_factors.py

Needs jax_privacy (2.0.0), in an environment of its own. Prints, for rounds n, min separation b,
buffers and momentum, the sensitivity and the root mean square error of the models of the optimised
BLT; and for bands, those of the square root of the prefix-sum matrix in a band, and of the
optimised band. An optimisation takes half a minute on one core.
"""

import dataclasses
import math

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax_privacy.matrix_factorization import buffered_toeplitz, optimization, toeplitz  # pyright: ignore[reportMissingImports]

ROUNDS, SEPARATIONS, BUFFERS = (1024, 2000), (100, 200, 400), (2, 3, 4, 5)
WITH_MOMENTUM = ((1024, 100, 2), (1024, 400, 3), (2000, 100, 3), (2000, 400, 3))
MOMENTUM = 0.9


def workload(rounds: int, momentum: float) -> jnp.ndarray:
    """Return by how much the model after t + 1 rounds has moved for a unit in the first one."""
    return jnp.cumsum(momentum ** jnp.arange(rounds))


@optimization.jax_enable_x64
def figures(
    coefficients: jnp.ndarray, rounds: int, separation: int, momentum: float = 0.0
) -> tuple[float, float]:
    """Return (sensitivity, root mean square error) of Toeplitz coefficients."""
    squared = toeplitz.minsep_sensitivity_squared(coefficients, separation, n=rounds)
    errors = toeplitz.per_query_error(
        strategy_coef=coefficients, n=rounds, workload_coef=workload(rounds, momentum)
    )
    return math.sqrt(float(squared)), math.sqrt(float(jnp.mean(errors)))


@optimization.jax_enable_x64
def best_blt(rounds: int, separation: int, buffers: int, momentum: float) -> jnp.ndarray:
    """Return the coefficients of the BLT with the least error of models at the same cost."""
    work = workload(rounds, momentum)
    loss = buffered_toeplitz.LossFn.build_min_sep(
        n=rounds,
        min_sep=separation,
        max_participations=-(-rounds // separation),
        error="mean",
    )
    loss = dataclasses.replace(
        loss,
        error_for_inv=lambda inverse: jnp.mean(
            toeplitz.per_query_error(
                noising_coef=inverse.toeplitz_coefs(rounds), workload_coef=work, skip_checks=True
            )
        ),
    )
    blt, _ = buffered_toeplitz.optimize_loss(loss, num_buffers=buffers)
    return blt.toeplitz_coefs(rounds)


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
                column = best_blt(rounds, separation, buffers, 0.0)
                print("blt", rounds, separation, buffers, *figures(column, rounds, separation))
    for rounds, separation, buffers in WITH_MOMENTUM:
        column = best_blt(rounds, separation, buffers, MOMENTUM)
        figure = figures(column, rounds, separation, MOMENTUM)
        print("blt, momentum", rounds, separation, buffers, *figure)


if __name__ == "__main__":
    main()
