"""The bench unpacks a model once, and gives every client the same start and its own result."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.training import shared_model as workbench
from fedsim.clients.training.shared_model import SharedModel
from fedsim.protocol.arrays import digest, live_record, to_arrays


class Net(nn.Module):
    """A frozen layer, a buffer, and two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.head = nn.Linear(2, 2)
        self.tied = self.head


def running_mean(shared_model: SharedModel) -> Tensor:
    return dict(shared_model.model.named_buffers())["norm.running_mean"]


def state(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    return {name: value.numpy().copy() for name, value in Net().state_dict().items()}


def test_a_global_model_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(workbench, "digest", lambda arrays: calls.append(1) or digest(arrays))
    shared_model, record = SharedModel(Net()), live_record(state(1))
    expected = digest(record)
    assert [shared_model.load(record), shared_model.load(record.copy())] == [expected] * 2
    assert len(calls) == 2, "the model, and its buffers"
    other = live_record(state(2))
    assert shared_model.load(other) == digest(other) != expected
    assert shared_model.load(record) == expected


@pytest.mark.parametrize("pack", [live_record, to_arrays])
def test_every_client_starts_from_the_global_model(pack) -> None:
    shared_model, record = SharedModel(Net()), pack(state(1))
    for _ in range(2):
        shared_model.load(record)
        shared_model.restart()
        for name, value in shared_model.model.state_dict().items():
            np.testing.assert_array_equal(value.numpy(), record[name].numpy())
        shared_model.parameters.data += 1.0
        running_mean(shared_model).add_(5.0)


@pytest.mark.parametrize("pack", [live_record, to_arrays])
@pytest.mark.parametrize("private", [True, False])
def test_an_upload_has_what_may_leave(pack, private: bool) -> None:
    """Tied names agree; under privacy, what no noise has touched is the server's own."""
    shared_model, record = SharedModel(Net()), pack(state(1))
    shared_model.load(record)
    shared_model.restart()
    shared_model.parameters.data += 1.0
    running_mean(shared_model).add_(5.0)
    trained = shared_model.parameters.data.numpy().copy()
    upload = shared_model.upload_of(trained, record, private=private)
    assert list(upload) == list(record)
    sent = {name: array.copy() for name, array in upload.items()}
    shared_model.restart()  # the next client
    for name, array in upload.items():
        given = record[name].numpy()
        change = {"head": 1.0, "tied": 1.0, "norm": 0.0 if private else 5.0}.get(
            name.split(".")[0], 0.0
        )
        expected = (
            given + change if name != "norm.num_batches_tracked" and "var" not in name else given
        )
        np.testing.assert_array_equal(array, expected.astype(given.dtype))
        np.testing.assert_array_equal(array, sent[name])


def test_a_model_of_another_shape_is_refused() -> None:
    shared_model = SharedModel(Net())
    wrong = state(1)
    wrong["head.bias"] = np.zeros(3, dtype=np.float32)
    with pytest.raises(RuntimeError, match="size mismatch"):
        shared_model.load(live_record(wrong))
    good = live_record(state(2))
    assert shared_model.load(good) == digest(good)
