"""Low-rank adapters: gradients, merged weights, and what travels."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.per_example import OneAtATime
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.models.adapters import (
    AdaptedLayer,
    add_adapters,
    fix_statistics,
    merge_adapters,
    train_only,
)
from fedsim.models.build import build_model
from fedsim.models.catalog import ModelError
from fedsim.models.local_base import BASE_DIGEST, LocalBase, OtherBaseError, whole_state
from fedsim.models.settings import LoraSettings, ModelSettings


class Tokens(nn.Module):
    """An embedding, a convolution over time and linear layers on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.over_time = nn.Conv1d(6, 8, 3, padding=1)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.over_time(self.table(x).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.mix(torch.relu(h))).mean(1))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 1), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def adapted_model(model: nn.Module, train=()) -> nn.Module:
    train_only(model, train)
    model = add_adapters(model, LoraSettings(rank=3, alpha=6.0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


CASES = {
    "tokens": (Tokens, lambda: torch.randint(0, 11, (5, 7)), ["head.bias"]),
    "images": (images, lambda: torch.randn(5, 2, 6, 6), ["4.bias"]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_example_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    build, inputs, train = CASES[name]
    model = adapted_model(build(), train).double()
    x, y = inputs(), torch.arange(5) % 3
    x = x.double() if x.is_floating_point() else x
    found = gradients_for(model, loss, x, y)
    assert isinstance(found, RuleGradients)
    assert found.units == ()  # no torch.func
    assert found.stacks
    exact = OneAtATime(model, loss, parameters=found.parameters)
    torch.testing.assert_close(found.gradients(x, y), exact.gradients(x, y), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_a_merged_model_is_a_plain_one_with_the_same_outputs(name: str) -> None:
    torch.manual_seed(0)
    build, inputs, _ = CASES[name]
    plain, x = build(), inputs()
    model = adapted_model(deepcopy(plain)).eval()
    merged = merge_adapters(deepcopy(model))
    assert list(merged.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(merged(x), model(x))
    assert not torch.allclose(model(x), plain(x))
    layer = next(each for each in model.modules() if isinstance(each, AdaptedLayer))
    assert layer.weight.shape == layer.base.weight.shape


def build(base: Path, **settings):
    return build_model(
        ModelSettings.model_validate({"name": "mlp", "args": {"hidden": [4]}, **settings}),
        input_shape=(6,),
        num_outputs=3,
        seed=settings.pop("seed", 0),
        base=base,
    )


def test_the_initial_model_is_the_backbone_and_its_adapters_alone_travel(tmp_path: Path) -> None:
    backbone = build(tmp_path)
    save_file({"1.weight": torch.randn(4, 6)}, tmp_path / "w.safetensors")
    with_file = build(tmp_path, init="w.safetensors")
    model = build(tmp_path, init="w.safetensors", lora={"rank": 2, "targets": ["1"]}, train=["3.*"])
    x = torch.randn(5, 6)
    assert torch.equal(model(x), with_file(x))
    assert not torch.equal(model(x), backbone(x))
    names = ["1.down.weight", "1.up.weight", "3.weight", "3.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == names
    assert [*model.state_dict()] == [*names, BASE_DIGEST]
    assert {"1.base.weight", "1.base.bias"} < whole_state(model).keys()


def test_values_of_another_backbone_are_refused(tmp_path: Path) -> None:
    save_file({"1.weight": torch.ones(4, 6)}, tmp_path / "one.safetensors")
    save_file({"1.weight": torch.full((4, 6), 1.0001)}, tmp_path / "two.safetensors")
    lora = {"rank": 2, "targets": ["1"]}
    one, same, two = (
        build(tmp_path, init=f"{name}.safetensors", lora=lora) for name in ("one", "one", "two")
    )
    with torch.no_grad():
        one.get_parameter("1.up.weight").fill_(0.5)
    same.load_state_dict(one.state_dict())
    assert (same.get_parameter("1.up.weight") == 0.5).all()
    with pytest.raises(OtherBaseError, match=r"same file in model\.init"):
        two.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"targets": ["2"]}}, "lora.targets: '2' is no frozen linear.*; it has 1, 3"),
        ({"lora": {"targets": ["*"]}, "train": ["*"]}, "lora.targets: .* is no frozen linear"),
        ({"lora": {}, "train": ["3.wieght"]}, "train: '3.wieght' .* did you mean '3.weight'"),
    ],
)
def test_patterns_that_fit_nothing_are_refused(tmp_path: Path, settings, message) -> None:
    with pytest.raises(ModelError, match=f"model.{message}"):
        build(tmp_path, **settings)


def test_frozen_batch_normalisation_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    train_only(model, ["2.*"])
    fix_statistics(model)
    LocalBase(model).attach(model)
    before = deepcopy(whole_state(model))
    model.train()(torch.randn(8, 4))
    after = whole_state(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert list(model.state_dict()) == ["2.weight", "2.bias", BASE_DIGEST]
