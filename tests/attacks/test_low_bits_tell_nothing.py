"""The low bits of a released coordinate do not tell whether an example is there.

A float32 normal alone fills the fine grid around 0. Added to a clipped gradient of norm C, the same
noise leaves a coarse grid there. "Is |y| below σ/4, and no multiple of 2^-29?" told an absent
example from a present one with δ ≥ 0.15 at every ε, where (4.38, 1e-5) was printed.

Two worlds are compared: the example is there, or is a row of zeros. In both, the releases near 0
are taken, and of these the share that are multiples of 2^-j, for each j. What noise of a smooth law
on one grid releases has equal shares, up to the number of releases. Each comparison is Fisher's
exact test: it raises a false alarm with a probability below FALSE_ALARM, in any seed's place.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel

FALSE_ALARM = 1e-9  # of one comparison; a run of this file makes fewer than 400
RELEASES, CLIENTS = 800, 50
POWERS = range(20, 64)
LOCAL = LocalSettings.model_validate(
    {"steps": 1, "batch_size": 1, "optimizer": {"name": "sgd", "lr": 1e-12}}
)
Values = NDArray[np.float64]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum(1)


def releases(x: float, batch: float, *, secure: bool, dtype: torch.dtype, seed: int) -> Values:
    """Releases of the only coordinate; the gradient of an example x = 1 is clipped to C = 1."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    gradients = RuleGradients(model, squared_error)
    gradients.stacks = True
    step = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(1.0), 1.0, batch)
    step = step.for_model(gradients.parameters)
    data = torch.tensor([[x]], dtype=dtype), torch.tensor([[-100.0]], dtype=dtype)
    steps = range(RELEASES // CLIENTS)
    keys = (StreamKey(seed, client, 1) for client in range(CLIENTS))
    members = [BlockMember(*data, key, steps, step, secure) for key in keys]
    found: list[float] = []
    block_of(
        *(SharedModel(model, parameters=gradients.parameters), squared_error, gradients, LOCAL),
        members,
    ).train(lambda batches, released, used: found.extend(released.flatten().tolist()))
    return np.array(found)


def check_low_bits(present: Values, absent: Values, batch: float) -> None:
    """No share of multiples of 2^-j near 0 differs between the worlds."""
    near = [y[np.abs(y) < 0.25 / batch] for y in (present, absent)]
    assert min(map(len, near)) > RELEASES / 20
    for power in POWERS:
        multiples = [int((np.ldexp(y, power) == np.rint(np.ldexp(y, power))).sum()) for y in near]
        table = [[count, len(y) - count] for count, y in zip(multiples, near, strict=True)]
        chance: float = getattr(stats.fisher_exact(table), "pvalue")  # noqa: B009  its stubs lack it
        assert chance > FALSE_ALARM, f"multiples of 2^-{power}: {table[0]} present, {table[1]} not"


@pytest.mark.parametrize(
    ("secure", "batch", "dtype"),
    [
        (False, 28.0, torch.float32),
        (True, 32.0, torch.float32),
        (False, 32.0, torch.float64),
    ],
)
def test_low_bits_do_not_tell_an_absent_example_from_a_present_one(
    secure: bool, batch: float, dtype: torch.dtype
) -> None:
    present = releases(1.0, batch, secure=secure, dtype=dtype, seed=1)
    absent = releases(0.0, batch, secure=secure, dtype=dtype, seed=2)
    check_low_bits(present, absent, batch)


def test_mutation_float32_noise_added_to_a_sum_is_caught() -> None:
    """The release before: a float32 normal, times σ/L, to which the clipped sum over L is added."""
    noise = np.random.default_rng(0).normal(size=(2, RELEASES)).astype(np.float32) / np.float32(28)
    with pytest.raises(AssertionError, match="multiples of"):
        check_low_bits((noise[0] + np.float32(1 / 28)).astype(float), noise[1].astype(float), 28.0)


@pytest.mark.parametrize("offset", [0.5, 0.25, 2.0**-10])
def test_mutation_a_sum_beside_the_grid_of_the_noise_is_caught(offset: float) -> None:
    """Noise on a grid hides only sums on that grid."""
    noise = np.rint(np.random.default_rng(0).normal(size=(2, RELEASES)) * 2**24)
    present, absent = ((noise[0] + 2**24 + offset) * 2.0**-29, noise[1] * 2.0**-29)
    with pytest.raises(AssertionError, match="multiples of"):
        check_low_bits(present, absent, 32.0)
