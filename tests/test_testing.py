"""check_model finds what a run would refuse, and passes what a run would take."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.data import DataError
from fedsim.testing import ContractError, check_model

GENERATOR = np.random.default_rng(0)
FEATURES = GENERATOR.normal(size=(12, 6)).astype(np.float32)
TARGETS = np.arange(12) % 3


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 3))


def outcomes(error: ContractError) -> dict[str, str]:
    return {check.name: check.outcome for check in error.contract.checks}


def refused(build, **settings) -> ContractError:
    with pytest.raises(ContractError) as caught:
        check_model(build, FEATURES, TARGETS, **settings)
    return caught.value


class Forward(nn.Module):
    """A linear model whose forward pass does something more."""

    def __init__(self, more) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self, self.layer(x))


class TestGoodModels:
    @pytest.mark.parametrize("private", [True, False])
    def test_a_good_model_keeps_the_contract_and_random_generators_are_as_before(self, private):
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        contract = check_model(mlp, FEATURES, TARGETS, args={"width": 16}, private=private)
        assert contract.kept
        assert {check.outcome for check in contract.checks} == {"ok"}
        assert len(contract.checks) == (8 if private else 5)
        assert torch.equal(torch.rand(4), expected)
        assert "ok      builds a module" in str(contract)
        assert ("by layer rules, the fast method" in str(contract)) == private

    def test_dropout_and_recurrent_layers_are_welcome(self):
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 3))

        assert check_model(build, FEATURES, TARGETS).kept

    @pytest.mark.parametrize("loss", ["mse", lambda out, y: (out[:, 0] - y).abs()])
    def test_regression_and_own_losses(self, loss):
        targets = FEATURES.sum(axis=1)
        assert check_model(lambda: nn.Linear(6, 1), FEATURES, targets, loss=loss).kept

    def test_batch_norm_may_run_without_privacy(self):
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

        assert check_model(build, FEATURES, TARGETS, private=False).kept
        assert outcomes(refused(build))["keeps no batch statistics"] == "failed"


class TestWhatIsRefused:
    def test_no_module_at_all(self):
        error = refused(lambda: nn.Linear)
        assert "must return a torch.nn.Module, got the class Linear" in str(error)
        assert set(outcomes(error).values()) == {"failed", "skipped"}

    def test_a_build_that_raises(self):
        assert "ZeroDivisionError" in str(refused(lambda: 1 / 0))

    def test_nothing_to_train(self):
        assert "nothing to train" in str(refused(lambda: nn.Flatten()))

    def test_lazy_layers(self):
        assert "give every layer its input size" in str(refused(lambda: nn.LazyLinear(3)))

    def test_weights_from_another_generator(self):
        def build() -> nn.Module:
            model = nn.Linear(6, 3)
            nn.init.constant_(model.bias, random.random())
            return model

        error = refused(build)
        assert outcomes(error)["same seed, same weights"] == "failed"
        assert "'bias' differs between two builds" in str(error)

    def test_too_few_outputs(self):
        error = refused(lambda: nn.Linear(6, 2))
        assert outcomes(error)["fits data and loss"] == "failed"

    def test_a_loss_that_averages(self):
        error = refused(mlp, loss=F.cross_entropy)
        assert "one value per example" in str(error)

    def test_a_loss_that_couples_examples(self):
        def centred(outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs - outputs.mean(0), targets, reduction="none")

        assert outcomes(refused(mlp, loss=centred))["fits data and loss"] == "failed"

    def test_a_model_that_couples_examples(self):
        def couple(_: nn.Module, out: Tensor) -> Tensor:
            return out - out.mean(0) if len(out) > 3 else out

        error = refused(lambda: Forward(couple))
        assert outcomes(error)["keeps examples independent"] == "failed"

    def test_noise_in_eval_mode(self):
        error = refused(lambda: Forward(lambda _, out: out + torch.rand(())))
        assert outcomes(error)["same input, same output"] == "failed"
        assert "self.training is False" in str(error)

    def test_random_numbers_from_elsewhere_while_training(self):
        def jitter(module: nn.Module, out: Tensor) -> Tensor:
            return out * (1.0 + random.random()) if module.training else out

        error = refused(lambda: Forward(jitter), private=False)
        assert outcomes(error)["trains reproducibly"] == "failed"

    def test_a_cut_graph(self):
        error = refused(lambda: Forward(lambda _, out: out.detach()), private=False)
        assert outcomes(error)["trains reproducibly"] == "failed"

    def test_all_that_is_wrong_is_told_at_once(self):
        def build() -> nn.Module:
            model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
            nn.init.constant_(model[2].bias, random.random())  # type: ignore[arg-type]
            return model

        error = refused(build)
        failed = [name for name, outcome in outcomes(error).items() if outcome == "failed"]
        assert len(failed) >= 3
        assert str(error).startswith(f"{len(failed)} of 8 checks failed")

    def test_data_that_are_none(self):
        with pytest.raises(DataError):
            check_model(mlp, np.array([["a"]]), [0])
