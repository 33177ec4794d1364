"""Tied tensors of a model: one tensor, several names, one part of a noisy sum."""

from torch import nn

from fedsim.clients.training.shared_model import SharedModel


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.own = nn.Linear(3, 2)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_further_names_of_a_tensor_lead_to_its_first_one() -> None:
    shared = SharedModel(_Tied())
    assert shared.tied_names == {"second.weight": "first.weight"}
    assert set(shared.trained_shapes) == {"first.weight", "own.weight", "own.bias", "second.weight"}


def test_without_tied_tensors_there_are_none() -> None:
    assert SharedModel(nn.Linear(3, 2)).tied_names == {}
