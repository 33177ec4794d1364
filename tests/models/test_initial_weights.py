"""Initial weights from a file, and frozen parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsim.models.build import build_model
from fedsim.models.catalog import ModelError
from fedsim.models.settings import ModelSettings


def build(base: Path, **settings):
    return build_model(
        ModelSettings.model_validate({"name": "mlp", "args": {"hidden": [4]}, **settings}),
        input_shape=(6,),
        num_outputs=3,
        seed=0,
        base=base,
    )


def test_a_file_gives_its_values_and_the_others_are_of_the_seed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    save_file({"1.weight": torch.full((4, 6), 0.5)}, tmp_path / "sub" / "w.safetensors")
    model, plain = build(tmp_path, init="sub/w.safetensors"), build(tmp_path)
    assert (model.state_dict()["1.weight"] == 0.5).all()
    for name in ("1.bias", "3.weight", "3.bias"):
        assert torch.equal(model.state_dict()[name], plain.state_dict()[name])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        ({"1.wight": torch.ones(4, 6)}, "'1.wight' .* not in the model; did you mean '1.weight'"),
        ({"1.weight": torch.ones(4, 7)}, r"'1.weight' .* shape \(4, 7\), .* \(4, 6\)"),
        ({"1.weight": torch.ones(4, 6).half()}, "'1.weight' .* float16, .* float32"),
        ({"1.bias": torch.tensor([1.0, 2, 3, torch.nan])}, "'1.bias' .* NaN"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, tensors, message) -> None:
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=f"model.init: .*{message}"):
        build(tmp_path, init="w.safetensors")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        build(tmp_path, init="w.safetensors")


def test_frozen_parameters_have_no_gradient(tmp_path: Path) -> None:
    model = build(tmp_path, freeze=["1.*"])
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained == ["3.weight", "3.bias"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["1.*", "head.*"], r"'head.\*' is no parameter of the model; it has 1.weight, 1.bias"),
        (["1.wight"], "did you mean '1.weight'"),
        (["*"], "all parameters of the model are frozen"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(tmp_path, patterns, message) -> None:
    with pytest.raises(ModelError, match=f"model.freeze: .*{message}"):
        build(tmp_path, freeze=patterns)
