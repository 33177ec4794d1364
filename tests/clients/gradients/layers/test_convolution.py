"""Convolutions as products with patches: the numbers are those of torch, for each client."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedsim.clients.gradients.layers.base import Operand, squared_norms
from fedsim.clients.gradients.layers.convolution import ConvolutionUse, Geometry

CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


@st.composite
def layers(draw: st.DrawFn, *, dimensions: int | None = None) -> dict[str, Any]:
    """Convolutions in one to three dimensions, padded on both sides alike or not."""
    d = dimensions or draw(st.sampled_from([1, 2, 2, 3]))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(d))

    largest = 11 if d < 3 else 7
    return {
        "clients": draw(st.integers(1, 3)),
        "rows": draw(st.integers(1, 3)),
        "channels": draw(st.sampled_from([1, 2, 3])),
        "out": draw(st.sampled_from([1, 3, 8])),
        "size": numbers(7, largest),
        "geometry": Geometry(
            kernel=numbers(1, 4 if d < 3 else 2),
            stride=numbers(1, 3),
            dilation=numbers(1, 2),
            padding=tuple(zip(numbers(0, 2), numbers(0, 2), strict=True)),
        ),
        "bias": draw(st.booleans()),
        "trained": draw(st.sampled_from([(True, True), (True, False), (False, True)])),
        "channels_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
    }


def reference(geometry: Geometry) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        sides = [side for sides in reversed(geometry.padding) for side in sides]
        convolve = CONVOLVE[w.ndim - 2]
        padded = functional.pad(x, sides)
        return convolve(padded, w, b, stride=geometry.stride, dilation=geometry.dilation)

    return run


@settings(deadline=None, max_examples=60)
@given(layer=layers())
def test_convolutions_are_torchs(check_rule: Callable[..., None], layer: dict[str, Any]) -> None:
    geometry, channels = layer["geometry"], layer["channels"]
    generator = torch.Generator().manual_seed(layer["seed"])
    x = torch.randn(
        layer["clients"] * layer["rows"], channels, *layer["size"], generator=generator
    ).double()
    if layer["channels_last"]:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    shapes = [(layer["out"], channels, *geometry.kernel), (layer["out"],)]
    trained = layer["trained"]
    if not layer["bias"]:
        shapes, trained = shapes[:1], (True,)
    check_rule(
        lambda w, b=None: ConvolutionUse(w, b, geometry),
        reference(geometry),
        x,
        shapes,
        clients=layer["clients"],
        trained=trained,
        seed=layer["seed"],
        dtype=layer["dtype"],
    )


@settings(deadline=None, max_examples=40)
@given(layer=layers(dimensions=2))
def test_the_order_of_memory_changes_no_bit(layer: dict[str, Any]) -> None:
    geometry, clients = layer["geometry"], layer["clients"]
    generator = torch.Generator().manual_seed(layer["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=layer["dtype"])

    x = normal(clients * layer["rows"], layer["channels"], *layer["size"])
    w = normal(clients, layer["out"], layer["channels"], *geometry.kernel)
    results = []
    for image in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        use = ConvolutionUse(Operand(w, 0), None, geometry)
        y = use.forward(image)
        use.input, use.output_gradient = image, torch.ones_like(y)
        into = torch.zeros_like(w)
        use.add_weighted(0, None, into)
        results.append((y, squared_norms({0: use})[0], into))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stride", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_kernels_of_one_place_with_a_stride(channels: int, stride: tuple[int, int]) -> None:
    """torch's own gradient of the weight is wrong here, or ends the process."""
    geometry = Geometry((1, 1), stride, (1, 1), ((1, 1), (0, 0)))
    w = torch.randn(1, 4, channels, 1, 1, dtype=torch.float32)
    x = torch.randn(2, channels, 8, 8)
    use = ConvolutionUse(Operand(w, 0), None, geometry)
    use.input, use.output_gradient = x, torch.randn_like(use.forward(x))
    into = torch.zeros_like(w)
    use.add_weighted(0, None, into)
    seen = functional.pad(x, [0, 0, 1, 1])[:, :, :: stride[0], :: stride[1]]
    expected = torch.einsum("noij,ncij->oc", use.output_gradient.double(), seen.double())
    torch.testing.assert_close(into[0, :, :, 0, 0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 4])
def test_rows_of_padding_have_no_gradient_and_change_no_other(channels: int) -> None:
    geometry, rows, sizes = Geometry((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))), 24, (3, 16)
    w, x = torch.randn(2, 5, channels, 3, 3), torch.randn(2 * rows, channels, 6, 6)
    weights = torch.cat([(torch.arange(rows) < size).float() for size in sizes])
    found = []
    for row_weights in (None, weights):
        use = ConvolutionUse(Operand(w, 0), None, geometry)
        g = use.forward(x).square()
        use.input, use.output_gradient = x, g * weights.view(-1, 1, 1, 1)
        use.row_weights = row_weights
        found.append(use.rows(0))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert not found[1][weights == 0].any()
    assert found[1][weights > 0].any(1).all()


@pytest.mark.parametrize("size", [(9, 9), (9, 8)])
def test_gradients_that_are_held_are_small(size: tuple[int, int]) -> None:
    """Where the weight is frozen, no input is kept: a bias needs none."""
    geometry = Geometry((3, 3), (1, 1), (1, 1), ((0, 0), (0, 0)))
    w = torch.randn(1, 4, 2, 3, 3)
    use = ConvolutionUse(Operand(w, None), Operand(torch.zeros(1, 4), 0), geometry)
    y = use.forward(torch.randn(5, 2, *size))
    assert not use.needs_input
    use.output_gradient = torch.ones_like(y)
    assert use.parameters == [0]
    places = y[0, 0].numel()
    assert squared_norms({0: use})[0].tolist() == pytest.approx([4 * places**2] * 5, rel=1e-5)
