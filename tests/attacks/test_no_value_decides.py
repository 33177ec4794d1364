"""No value decides whether a part enters a noisy sum, and nothing is clipped after noise.

Whatever the examples are, each client's integers are within the public bound of the sum's encoding,
so no encoder raises or clips: gradients that are huge, not finite, or all in one direction.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.noise.sources import MAX_DRAW
from fedsim.secagg.payload import PayloadCodec

PLUGIN = """
import numpy as np
import torch

VALUES = {values}


def load(seed=0):
    x = np.tile(np.array(VALUES, dtype=np.float32), (122, 1))
    y = np.arange(122) % 3
    return x[:120], y[:120], np.ones_like(x[120:]), y[120:]


def build():
    return torch.nn.Linear(4, 3, bias=False)


def loss(outputs, targets):
    return outputs.sum(1)
"""
VALUES: dict[str, str] = {
    "all in one direction": "[1.0, 0.0, 0.0, 0.0]",
    "huge": "[3e38, -3e38, 3e38, 1.0]",
    "infinite": "[np.inf, 1.0, 1.0, 1.0]",
    "not a number": "[np.nan, 1.0, 1.0, 1.0]",
    "zero": "[0.0, 0.0, 0.0, 0.0]",
}


def federation(base: Path, trust: str, values: str, noise: float) -> Federation:
    (base / "p.py").write_text(PLUGIN.format(values=values))
    content: dict[str, Any] = {
        "name": "extreme",
        "data": {"dataset": "./p.py:load", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "./p.py:build", "loss": "./p.py:loss"},
        "federation": {"rounds": 2},
        "local": {"steps": 1, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {
            "trust": trust,
            "noise_multiplier": noise,
            "delta": 1e-3,
            "max_grad_norm": 0.5,
        },
        "secure_aggregation": {"min_clients": 3},
    }
    return assemble(load_experiment(content, base=base), ledger=None, in_process=True)


def integers_of(whole: Federation) -> np.ndarray:
    assert whole.plan.clients is not None
    members = [
        BlockMember(
            *whole.client_task(k).data.tensors(),
            StreamKey(whole.experiment.seed, k, 1),
            range(1),
            plan.release_as(DpSgdMechanism),
            plan.secure_noise,
            plan.part,
        )
        for k, plan in enumerate(whole.plan.clients)
    ]
    result = block_of(
        whole.model.shared, whole.model.loss, whole.model.gradients, whole.experiment.local, members
    ).train()
    return result.values.numpy()


@pytest.mark.parametrize("trust", ["distributed", "central"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_upload_is_within_the_public_bound(values: str, trust: str, tmp_path: Path) -> None:
    try:
        whole = federation(tmp_path, trust, values, noise=0.3)
    except ValueError:  # data that are not finite never start
        assert "np." in values
        return
    assert whole.plan.sums is not None
    found = integers_of(whole)
    assert np.array_equal(found, np.rint(found))
    assert np.abs(found).max() <= whole.plan.sums.bound
    sums = whole.plan.sums
    codec = PayloadCodec.of_integers(sums.shapes, bound=sums.bound, num_clients=3)
    for row in found.astype(np.int64):
        (shape,) = sums.shapes.values()
        arrays = {name: row.reshape(shape) for name in sums.shapes}
        encoded = codec.encode(arrays, reference=None, weight=1)
        assert np.array_equal(encoded.view(np.int64)[: row.size], row)


@pytest.mark.parametrize("trust", ["distributed", "central"])
def test_the_bound_is_no_more_than_what_a_full_batch_needs(trust: str, tmp_path: Path) -> None:
    """All 40 examples in one direction: each of three rows has 1/√3 of a gradient's norm."""
    whole = federation(tmp_path, trust, VALUES["all in one direction"], noise=0.3)
    assert whole.plan.sums is not None
    assert whole.plan.clients is not None
    reserve = MAX_DRAW if trust == "distributed" else 0
    full = 40 / whole.plan.clients[0].release.noise_multiplier * 2**24
    assert whole.plan.sums.bound - reserve == pytest.approx(full, rel=2e-3)
    assert np.abs(integers_of(whole)).max() == pytest.approx(full / 3**0.5, rel=0.05)
