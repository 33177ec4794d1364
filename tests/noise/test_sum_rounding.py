"""Sums of clipped gradients are as near to the exact ones as their charge says."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.layers.base import LayerUse, Operand, Part
from fedsim.clients.gradients.layers.embedding import EmbeddingUse
from fedsim.clients.gradients.layers.linear import LinearUse
from fedsim.clients.gradients.per_example import ClipBounds, ClippedRows, PaddedBatch
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.mechanisms.dp_sgd.batch_sums import BatchSums, products_are_exact
from fedsim.noise.sources import SumRounding

C = 0.75


def halves(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def gradients(width: int, out: int) -> RuleGradients:
    torch.manual_seed(3)
    return RuleGradients(nn.Linear(width, out), halves)


def summed(
    of: RuleGradients, x: torch.Tensor, y: torch.Tensor, rounding: SumRounding
) -> tuple[torch.Tensor, list[ClippedRows]]:
    """Return the sum of a batch in one padded batch, and the clipped rows."""
    rows: list[ClippedRows] = []
    whole = of.clipped

    def clipped(*args: object) -> ClippedRows:
        rows.append(whole(*args))  # type: ignore[arg-type]
        return rows[-1]

    of.clipped = clipped  # type: ignore[method-assign]
    sums = BatchSums(of.parameters, [rounding], len(x))
    clipping = FlatClipping(C)
    groups = clipping.groups(of.parameters)
    scales = torch.ones(len(x), 1, dtype=torch.float64)
    clip = ClipBounds(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)
    padded = PaddedBatch(1, x, y, torch.ones(len(x)))
    values = of.parameters.data.unsqueeze(0)
    sums.begin([len(x)])
    added = list(sums.add(of.clipped(values, padded, clip)))
    ((_, total),) = added or sums.end()
    return total[0].clone(), rows


def exact_sum(rows: ClippedRows, dtype: torch.dtype) -> list[Fraction]:
    """Return the sum of the products that were added, in rational arithmetic."""
    (use,) = {id(one): one for one in rows.uses.values()}.values()
    factors = rows.factors[0].to(dtype).flatten()
    g = use.output_gradient.to(dtype) * factors.unsqueeze(1)  # type: ignore[attr-defined]
    left = [[Fraction(v) for v in row] for row in g.tolist()]
    right = [[Fraction(v) for v in row] for row in use.input.tolist()]  # type: ignore[attr-defined]
    places = range(len(left[0]))
    weight = [
        sum((a[o] * b[i] for a, b in zip(left, right, strict=True)), Fraction(0))
        for o in places
        for i in range(len(right[0]))
    ]
    return weight + [sum((a[o] for a in left), Fraction(0)) for o in places]


@pytest.mark.parametrize("n", [1, 7, 64, 65, 129])
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_a_float32_sum_is_within_its_error_of_the_exact_one(n: int, spread: float) -> None:
    """Values of very different size, each example clipped to the bound: rounding shows."""
    of = gradients(6, 3)
    x = torch.randn(n, 6) * torch.logspace(0, math.log10(spread), n).unsqueeze(1)
    y = torch.randn(n, 3) * 100
    rounding = SumRounding.of(n, n)
    assert rounding.rows == n
    found, (rows,) = summed(of, x, y, rounding)
    assert found.dtype == torch.float32
    exact = exact_sum(rows, torch.float32)
    off = math.sqrt(sum((Fraction(f) - e) ** 2 for f, e in zip(found.tolist(), exact, strict=True)))
    assert off <= rounding.error * C
    assert n < 40 or off > 1e-9 * C, "float32 rounds"
    each = rows.norms.flatten() * rows.factors[0].flatten()
    assert each.max() <= C


def test_batches_beyond_the_tile_are_added_up_in_float64() -> None:
    of = gradients(6, 3)
    x, y = torch.randn(60, 6), torch.randn(60, 3) * 100
    found, (rows,) = summed(of, x, y, SumRounding.of(1000, 59))
    assert found.dtype == torch.float64
    exact = exact_sum(rows, torch.float64)
    off = math.sqrt(sum((Fraction(f) - e) ** 2 for f, e in zip(found.tolist(), exact, strict=True)))
    assert off < 1e-13


def test_the_error_is_that_of_the_theorem() -> None:
    u = Fraction(1, 2**24)
    taller, lower = [(r, 64) for r in (1, 8, 63, 64, 65, 200, 400)], [(470, 48), (500, 48)]
    for rows, height in taller + lower:
        m = min(rows, height) + -(-rows // height) + 2
        single = rows * m * u / (1 - m * u)
        found = SumRounding.of(5000, rows)
        assert (found.rows, found.height) == (rows, height)
        assert single <= Fraction(found.error) < single * (1 + Fraction(1, 10**9))
    for examples, rows in ((10**6, 48), (5000, 1000), (60_000, 600)):
        double = Fraction(examples * (2 * examples + 16), 2**53)
        found = SumRounding.of(examples, rows)
        assert Fraction(found.error) >= double
        assert (found.rows == 0) == (rows > 300)


def rounded_down(rows: int) -> torch.Tensor:
    """Return values up to 1 that lose most, if each is added to the float32 sum of those before."""
    total, values = np.float32(0.0), []
    for _ in range(rows):
        half = np.spacing(np.float32(total + np.float32(1.0))) / 2
        values.append(np.float32(1.0 - half * (1.0 + 2.0**-7)))
        total = np.float32(total + values[-1])
    return torch.tensor(np.array(values))


@pytest.mark.parametrize("rows", [64, 65, 440])
@pytest.mark.parametrize("kind", ["square", "wide", "thin", "large", "together", "table"])
def test_runs_keep_the_error_of_values_that_all_round_down(kind: str, rows: int) -> None:
    """A product that adds each row to the runs before it loses twice what is charged."""
    shapes = {"square": (8, 8), "wide": (2, 784), "thin": (1, 1), "table": (3, 5)}
    out, width = shapes.get(kind, (8, 1500))
    values, rounding = rounded_down(rows), SumRounding.of(rows, rows)
    weight = Operand(torch.zeros(1, out, width), 0)
    use: LayerUse = LinearUse(weight, None)
    use.input, use.output_gradient = torch.zeros(rows, width), torch.zeros(rows, out)
    use.input[:, 0], use.output_gradient[:, 0] = values, 1.0
    if kind == "table":
        use = EmbeddingUse(weight, None)
        use.input, use.output_gradient = torch.zeros(rows).long(), torch.zeros(rows, width)
        use.output_gradient[:, 0] = values
    into = torch.full((1, out, width), torch.nan)
    part = Part(None if kind == "together" else 0, slice(0, rows), rounding.height)
    use.add_runs(0, torch.ones(1, rows), into, part, overwrite=True)
    exact = sum(map(Fraction, values.tolist()), Fraction(0))
    assert abs(Fraction(into[0, 0, 0].item()) - exact) <= rounding.error
    assert into.count_nonzero() == 1


def test_a_client_without_examples_may_have_another_tile() -> None:
    """Also where a tile is so high that larger batches are added up in float64."""
    of = gradients(6, 3)
    x, y = torch.randn(2 * 600, 6), torch.randn(2 * 600, 3)
    clipping = FlatClipping(C)
    groups = clipping.groups(of.parameters)
    scales = torch.ones(1200, 1, dtype=torch.float64)
    scales[600:] = 0.0
    clip = ClipBounds(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)
    rows = of.clipped(
        of.parameters.data.expand(2, -1), PaddedBatch(2, x, y, torch.ones(1200)), clip
    )
    for other in (SumRounding.of(600, 600), SumRounding.of(9, 9), None):
        sums = BatchSums(of.parameters, [SumRounding.of(600, 600), other], 600)
        sums.begin([600, 0])
        found = {clients.start: total for clients, total in [*sums.add(rows), *sums.end()]}
        assert found[0].dtype == torch.float64
        assert found[0].any()
        assert not found[1].any()


def test_a_charge_never_costs_more_than_half_a_percent_of_the_noise() -> None:
    worst = max(SumRounding.of(10**5, rows).error for rows in range(1, 5000))
    assert 1 / (1 + 2 * worst) > 0.995


def test_settings_of_torch_that_round_products_are_found() -> None:
    device = torch.device("cpu")
    assert products_are_exact(device)
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            assert not products_are_exact(device)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert products_are_exact(device)


@pytest.mark.parametrize("width", [6, 4000])  # added up in one call, and client by client
def test_the_bits_of_a_client_do_not_depend_on_the_batches_of_others(width: int) -> None:
    """Also where another batch is long, and so takes float64 and a second padded batch."""
    of, rows, clients = gradients(width, 5), 16, 3
    x, y = torch.randn(clients * rows, width), torch.randn(clients * rows, 5) * 9
    clipping = FlatClipping(C)
    groups = clipping.groups(of.parameters)

    def clip(padded: PaddedBatch) -> ClipBounds:
        scales = padded.example_weights.double().unsqueeze(1)
        return ClipBounds(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)

    def own(sizes: list[int], padded_batches: int) -> torch.Tensor:
        made = []
        for number in range(padded_batches):
            left = np.clip(np.array(sizes) - number * rows, 0, rows)
            real = np.arange(rows) < left[:, None]
            weights = torch.from_numpy(real.reshape(-1)).float()
            made.append(PaddedBatch(clients, x * weights.unsqueeze(1), y, weights))
        sums = BatchSums(of.parameters, [SumRounding.of(100, rows)] * clients, rows)
        values = of.parameters.data.expand(clients, -1)
        total = torch.zeros(clients, of.parameters.size, dtype=torch.float64)
        sums.begin(sizes)
        for padded in made:
            for clients_of, one in sums.add(of.clipped(values, padded, clip(padded))):
                total[clients_of] = one.double()
        for clients_of, one in sums.end():
            total[clients_of] = one
        return total[1]

    first = own([16, 13, 16], 1)
    assert first.any()
    assert torch.equal(own([0, 13, 2], 1), first)
    assert torch.equal(own([17, 13, 40], 3), first)
