import pytest
import torch
from torch.nn import functional as F

from fedsim.models.catalog import LOSSES, ModelError
from fedsim.models.losses import bce, check_loss, cross_entropy, mse, resolve_loss

N = 6


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_every_listed_loss_resolves(tmp_path):
    for name in LOSSES:
        assert callable(resolve_loss(name, tmp_path))


def test_cross_entropy_agrees_with_torch():
    outputs, targets = normal(N, 4), torch.arange(N) % 4
    losses = cross_entropy(outputs, targets)
    assert losses.shape == (N,)
    torch.testing.assert_close(losses.mean(), F.cross_entropy(outputs, targets))


@pytest.mark.parametrize("outputs_shape", [(N,), (N, 1)])
@pytest.mark.parametrize("targets_shape", [(N,), (N, 1)])
def test_single_columns_are_never_broadcast(outputs_shape, targets_shape):
    outputs, targets = normal(N).reshape(outputs_shape), torch.arange(N).reshape(targets_shape)
    losses = mse(outputs, targets)
    assert losses.shape == (N,)
    torch.testing.assert_close(losses, (outputs.flatten() - targets.flatten()) ** 2)
    labels = (torch.arange(N) % 2).reshape(targets_shape)
    losses = bce(outputs, labels)
    assert losses.shape == (N,)
    torch.testing.assert_close(
        losses.mean(),
        F.binary_cross_entropy_with_logits(outputs.flatten(), labels.flatten().float()),
    )


def test_columns_are_averaged():
    outputs, targets = normal(N, 3), normal(N, 3).sign().clamp(min=0)
    torch.testing.assert_close(mse(outputs, targets).mean(), F.mse_loss(outputs, targets))
    torch.testing.assert_close(
        bce(outputs, targets).mean(), F.binary_cross_entropy_with_logits(outputs, targets)
    )


@pytest.mark.parametrize("loss", [mse, bce])
@pytest.mark.parametrize("shapes", [((N, 2), (N,)), ((N, 2), (N, 1)), ((N, 1), (N, 2))])
def test_different_numbers_of_columns_are_refused(loss, shapes):
    with pytest.raises(ModelError, match="one output per target"):
        loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (cross_entropy, normal(3, 4), torch.tensor([0, 3, 1])),
        (mse, normal(3, 1), torch.tensor([0.5, 1, 2])),
        (bce, normal(3), torch.tensor([0, 1, 1])),
    ],
)
def test_built_in_losses_are_per_example_vectorise_and_take_empty_batches(loss, outputs, targets):
    check_loss(loss, outputs, targets)
    assert loss(outputs[:0], targets[:0]).shape == (0,)
    one_by_one = torch.func.vmap(lambda o, t: loss(o[None], t[None])[0])(outputs, targets)
    torch.testing.assert_close(one_by_one, loss(outputs, targets))


OUTPUTS, TARGETS = normal(3, 4), torch.tensor([0, 3, 1])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (F.cross_entropy, r"must return shape \(3,\) for a batch of 3, .* reduction='none'"),
        (lambda o, t: cross_entropy(o, t)[:, None], r"got shape \(3, 1\); return one value"),
        (lambda o, t: cross_entropy(o, t).squeeze(), r"\(1,\) for a batch of 1, .* squeeze"),
        (lambda o, t: cross_entropy(o, t) / len(o), "depends on the other examples of its batch"),
        (lambda o, t: cross_entropy(o, t) - o.mean().detach(), "depends on the other examples"),
        (lambda o, t: cross_entropy(o - o.mean(0), t), "gradient at the outputs of another"),
        (lambda o, t: cross_entropy(o, t).mean().expand(len(o)), "outputs of another"),
        (lambda o, t: cross_entropy(o, t).detach(), "no gradient reaches the outputs"),
        (lambda o, t: cross_entropy(o, t).log().log(), "is not finite on the initial model"),
        (lambda o, t: cross_entropy(o, t).tolist(), "must return a tensor, got list"),
        (lambda o, t: o[:, 9], r"failed with IndexError.* \(3, 4\) and targets int64 of shape"),
    ],
)
def test_losses_that_are_not_per_example_are_refused(loss, message):
    with torch.no_grad(), pytest.raises(ModelError, match=message) as caught:
        check_loss(loss, OUTPUTS, TARGETS, name="model.loss 'mine'")
    assert str(caught.value).startswith("model.loss 'mine': ")
    assert "\n" not in str(caught.value)


def test_a_users_loss_is_found(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def loss(outputs, targets):\n    return (outputs - targets).abs().sum(dim=1)\n"
    )
    loss = resolve_loss("./mine.py:loss", tmp_path)
    check_loss(loss, normal(3, 2), torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cross_entrpy", "did you mean cross_entropy?"),
        ("hinge", "built in: cross_entropy, mse, bce"),
        ("./absent.py:loss", "model.loss './absent.py:loss': no such file"),
    ],
)
def test_unknown_losses_are_refused(name, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        resolve_loss(name, tmp_path)
