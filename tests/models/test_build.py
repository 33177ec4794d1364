from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.models.build import _seed_torch, build_model
from fedsim.models.catalog import MODELS, ModelError
from fedsim.models.settings import ModelSettings

HEAD = "import torch\nfrom torch import nn\n"


def build(base: Path = Path(), seed: int = 0, input_shape=(1, 8, 8), num_outputs=10, **settings):
    return build_model(
        ModelSettings.model_validate(settings),
        input_shape=input_shape,
        num_outputs=num_outputs,
        seed=seed,
        base=base,
    )


def module(folder: Path, body: str) -> str:
    (folder / "net.py").write_text(f"{HEAD}def build(width=4):\n    {body}\n")
    return "./net.py:build"


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_map_a_batch_to_outputs(name):
    model = build(name=name)
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert model(torch.zeros(0, 1, 8, 8)).shape == (0, 10)


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_per_example_gradients(name):
    model = build(name=name)
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(values, x):
        return torch.func.functional_call(model, values, (x[None],)).square().sum()

    x = torch.rand(3, 1, 8, 8)
    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(3):
        alone = torch.func.grad(loss)(parameters, x[index])
        for key, value in alone.items():
            torch.testing.assert_close(together[key][index], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_flat_models_take_any_shape(name):
    assert build(name=name, input_shape=(3,), num_outputs=1)(torch.zeros(2, 3)).shape == (2, 1)


def test_arguments_decide_the_layers():
    assert not any(
        "bias" in key for key in build(name="logistic", args={"bias": False}).state_dict()
    )
    widths = [
        layer.out_features
        for layer in build(name="mlp", args={"hidden": [7, 5]}).modules()
        if isinstance(layer, nn.Linear)
    ]
    assert widths == [7, 5, 10]
    assert any(isinstance(layer, nn.Tanh) for layer in build(name="cnn").modules())


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((1, 2, 1), [16, 32, 64]),
        ((3, 2, 9), [7, 12]),
        ((2, 5, 5), [16, 32, 64]),
        ((1, 28, 28), [1]),
        ((1, 28, 28), [6]),
    ],
)
def test_cnn_takes_images_of_any_size(shape, channels):
    model = build(name="cnn", input_shape=shape, args={"channels": channels})
    assert model(torch.rand(2, *shape)).shape == (2, 10)


def test_no_model_couples_examples():
    for name in MODELS:
        model = build(name=name)
        x = torch.rand(4, 1, 8, 8)
        alone = torch.cat([model(x[i : i + 1]) for i in range(4)])
        torch.testing.assert_close(model(x), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_weights(name):
    torch.manual_seed(1)
    one = build(name=name).state_dict()
    torch.manual_seed(2)
    again = build(name=name).state_dict()
    other = build(name=name, seed=1).state_dict()
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build(name="mlp")
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ModelError):
        build(tmp_path, name=module(tmp_path, "torch.rand(3); raise ValueError"))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_over_the_whole_range_are_taken():
    for seed in (0, 2**63, 2**64 - 1):
        with _seed_torch(seed):
            assert np.isfinite(torch.rand(1).item())


def test_a_users_model_is_called_with_its_arguments_and_seeded(tmp_path):
    name = module(tmp_path, "return nn.Linear(3, width)")
    one, again = (build(tmp_path, name=name, args={"width": 2}) for _ in range(2))
    assert isinstance(one, nn.Linear)
    assert one.out_features == 2
    assert torch.equal(one.weight, again.get_parameter("weight"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return nn.Linear", "must return a torch.nn.Module, got the class Linear"),
        ("return None", "must return a torch.nn.Module, got NoneType"),
        ("raise RuntimeError('a\\nb')", r"failed with RuntimeError: a b \(net.py, line 4\)"),
        ("return nn.ReLU()", "no trainable parameters"),
        ("return nn.Linear(3, 0, bias=False)", "no trainable parameters"),
        ("return nn.Linear(3, 2).requires_grad_(False)", "no trainable parameters"),
        ("return nn.LazyLinear(3)", "give every layer its input size"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:Initializing zero-element")
def test_unfit_models_are_refused_on_one_line(body, message, tmp_path):
    with pytest.raises(ModelError, match=message) as caught:
        build(tmp_path, name=module(tmp_path, body))
    assert str(caught.value).startswith("model.name './net.py:build': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "mpl"}, "did you mean mlp?"),
        ({"name": "transformer"}, "built in: logistic, mlp, cnn"),
        ({"name": "./absent.py:build"}, "no such file"),
        ({"name": "mlp", "args": {"hidden": [0]}}, "model.args.hidden.0: .*greater than or equal"),
        ({"name": "mlp", "args": {"width": 3}}, "model.args.width: Extra inputs"),
        ({"name": "cnn", "input_shape": (64,)}, r"cnn takes images .* \(64,\); .* use mlp"),
    ],
)
def test_unknown_models_and_arguments_are_refused(settings, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        build(tmp_path, **settings)


def test_unknown_arguments_of_a_users_model_are_named(tmp_path):
    name = module(tmp_path, "return None")
    with pytest.raises(ModelError, match="unexpected keyword argument 'depth'; it is called with"):
        build(tmp_path, name=name, args={"depth": 3})
