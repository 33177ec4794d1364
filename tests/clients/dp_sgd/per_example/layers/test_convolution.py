"""Convolutions: whichever way is fast for a layer, the numbers are those of torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedsim.clients.dp_sgd.per_example.layers import ConvolutionUse
from fedsim.clients.dp_sgd.per_example.layers.channels_last import Geometry
from fedsim.clients.dp_sgd.per_example.layers.convolving import convolve, input_gradient
from fedsim.clients.dp_sgd.per_example.layers.patches import has_few_channels, patches_of


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """Layers that go every way: by patches with few and many channels, and by torch's own."""
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    return {
        "n": draw(st.integers(1, 4)),
        "channels": groups * draw(st.sampled_from([1, 3, 6])),
        "out": groups * draw(st.sampled_from([3, 16, 60])),
        "kernel": (draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        "stride": [draw(st.integers(1, 3)), draw(st.integers(1, 3))],
        "padding": [draw(st.integers(0, 2)), draw(st.integers(0, 2))],
        "dilation": [draw(st.integers(1, 2)), draw(st.integers(1, 2))],
        "groups": groups,
        "size": (draw(st.integers(7, 11)), draw(st.integers(7, 11))),
        "last": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
    }


def values_of(layer: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Geometry]:
    generator = torch.Generator().manual_seed(layer["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=layer["dtype"])

    x = normal(layer["n"], layer["channels"], *layer["size"])
    w = normal(layer["out"], layer["channels"] // layer["groups"], *layer["kernel"])
    spread = (layer["stride"], layer["padding"], layer["dilation"])
    return x, w, normal(layer["out"]), (*spread, False, [0, 0], layer["groups"])


def exact(x: Tensor, w: Tensor, b: Tensor, geometry: Geometry) -> Tensor:
    return torch.convolution(x.double(), w.double(), b.double(), *geometry)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-10
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()


def use_of(w: Tensor, b: Tensor, geometry: Geometry, *, last: bool) -> ConvolutionUse:
    stride, padding, dilation, *_, groups = geometry
    spread: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    use = ConvolutionUse(0, 1, w, b, **spread, groups=groups)
    use.channels_last = last
    return use


def after_a_pass(layer: dict[str, Any]) -> ConvolutionUse:
    x, w, b, geometry = values_of(layer)
    use = use_of(w, b, geometry, last=layer["last"])
    use.input, use.output_gradient = x, torch.randn_like(use.forward(x))
    return use


@settings(deadline=None)
@given(layers())
def test_output_and_input_gradient_are_torchs(layer: dict[str, Any]) -> None:
    x, w, b, geometry = values_of(layer)
    y, _ = convolve(x, w, b, geometry, last=layer["last"])
    ours = x.double().requires_grad_()
    wanted = exact(ours, w, b, geometry)
    assert_close(y, wanted.detach())
    assert_close(
        convolve(x, w, None, geometry, last=layer["last"])[0],
        wanted.detach() - b[:, None, None].double(),
    )
    g = torch.randn_like(y)
    (at_input,) = torch.autograd.grad(wanted, ours, g.double())
    stand_in = g.new_empty(1).expand(x.shape)
    assert_close(input_gradient(stand_in, g, w, geometry, last=layer["last"]), at_input)


@settings(deadline=None)
@given(layers())
def test_each_examples_gradient_is_that_of_the_example_alone(layer: dict[str, Any]) -> None:
    x, w, b, geometry = values_of(layer)
    use = after_a_pass(layer)
    g = use.output_gradient
    alone: list[tuple[Tensor, Tensor]] = []
    for i in range(len(x)):
        trained = w.double().requires_grad_(), b.double().requires_grad_()
        outputs = exact(x[i : i + 1], *trained, geometry)
        found = torch.autograd.grad(outputs, trained, g[i : i + 1].double())
        alone.append((found[0], found[1]))
    factors = torch.linspace(0.1, 1, len(x), dtype=w.dtype)
    for index, parameter in enumerate((w, b)):
        wanted = torch.stack([each[index] for each in alone])
        assert_close(use.gradients_of(index), wanted)
        norms = wanted.flatten(1).norm(dim=1)
        assert torch.allclose(use.squared_norms_of(index).sqrt(), norms, rtol=1e-5)
        into = torch.ones_like(parameter)
        use.add_weighted(index, factors, into)
        weights = factors.double().view(-1, *[1] * parameter.ndim)
        if wanted.any():  # else, into - 1 has the rounding of 1 only
            assert_close(into - 1, (wanted * weights).sum(0))
        again = use_of(w, b, geometry, last=layer["last"])
        again.forward(x)
        again.input, again.output_gradient = x, g
        if len(x) > 1:
            assert_close(again.of_rows(slice(1, None)).gradients_of(index), wanted[1:])


@settings(deadline=None)
@given(layers())
def test_the_sum_of_gradients_is_torchs(layer: dict[str, Any]) -> None:
    x, w, b, geometry = values_of(layer)
    use = after_a_pass(layer)
    g = use.output_gradient
    trained = w.double().requires_grad_(), b.double().requires_grad_()
    wanted = torch.autograd.grad(exact(x, *trained, geometry), trained, g.double())
    for index, parameter in enumerate(wanted):
        found = use.sum_of(index)
        assert_close(found, parameter)
        assert found.is_contiguous()


@settings(deadline=None)
@given(layers())
def test_the_order_of_memory_changes_no_bit(layer: dict[str, Any]) -> None:
    x, w, b, geometry = values_of(layer)
    found = []
    g: Tensor | None = None
    for order in (torch.contiguous_format, torch.channels_last):
        use = use_of(w, b, geometry, last=layer["last"])
        use.input = x.contiguous(memory_format=order)
        y = use.forward(use.input)
        g = torch.randn_like(y) if g is None else g
        use.output_gradient = g.contiguous(memory_format=order)
        at_input = use.input_gradient(use.input, use.output_gradient)
        found.append((y, at_input, *use.per_example().values()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@settings(deadline=None)
@given(layers())
def test_patches_are_those_that_torch_unfolds(layer: dict[str, Any]) -> None:
    x, w, _, geometry = values_of(layer | {"groups": 1})
    w = w.new_empty(len(w), x.shape[1], *w.shape[2:])
    spread: list[Any] = [geometry[2], geometry[1], geometry[0]]
    found = patches_of(x, w, geometry)
    wanted = functional.unfold(x, w.shape[2:], *spread).transpose(1, 2)
    if not has_few_channels(w):
        wanted = wanted.unflatten(2, w.shape[1:]).permute(0, 1, 3, 4, 2).flatten(2)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "step", "copied"),
    [
        (1, 16, 8, 2, True),
        (1, 8, 8, 2, False),
        (3, 32, 3, 1, False),
        (16, 32, 4, 2, True),
        (16, 32, 3, 1, False),
        (32, 64, 1, 1, True),
    ],
)
def test_patches_are_kept_where_they_are_little_beside_activations(
    channels: int, out: int, kernel: int, step: int, copied: bool
) -> None:
    x, w = torch.randn(2, channels, 16, 16), torch.randn(out, channels, kernel, kernel)
    geometry: Geometry = ([step, step], [0, 0], [1, 1], False, [0, 0], 1)
    y, patches = convolve(x, w, None, geometry, last=True)
    assert (patches is not None) == copied
    if patches is not None:
        assert patches.numel() <= 4 * max(x.numel(), y.numel())
    assert convolve(x.double(), w.double(), None, geometry, last=True)[1] is None
