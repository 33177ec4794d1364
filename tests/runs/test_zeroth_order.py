"""Federations with zeroth-order steps, against a few lines of numpy."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training.member import StreamKey
from fedsim.core.streams import Purpose, restart_at, stream
from fedsim.experiment.errors import ExperimentError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

P, RADIUS, LR, BOUND, Z = 3, 1e-2, 0.05, 0.8, 0.7
MARGIN = 1 - 2**-20  # of clip factors, for their rounding
EXPERIMENT = {
    "name": "slopes",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic", "args": {"init": "zeros"}},
    "federation": {"rounds": 3},
    "local": {
        "steps": 2,
        "batch_size": 100,
        "gradient": {"name": "zeroth_order", "directions": P, "radius": RADIUS},
        "optimizer": {"name": "sgd", "lr": LR},
    },
    "privacy": {"noise_multiplier": Z, "delta": 1e-3, "max_grad_norm": BOUND},
}


def run(base: Path, *changes: str, out: str = "run", **options):
    return run_experiment(EXPERIMENT, overrides=changes, out=base / out, base=base, **options)


def direction(round_number: int, step: int, number: int) -> np.ndarray:
    generator = stream(0, Purpose.DIRECTIONS, round_number=round_number)
    restart_at(generator, step, number)
    bits = np.unpackbits(generator.integers(0, 256, -(-650 // 8), dtype=np.uint8))[:650]
    return np.where(bits == 1, 1.0, -1.0)


def losses(values: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    scores = x @ values[:640].reshape(10, 64).T + values[640:]
    scores -= scores.max(axis=1, keepdims=True)
    return np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), y]


def numpy_rounds(federation) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the final values and the mean coefficients of each round, in float64 by numpy."""
    import torch

    values, history = np.zeros(650), []
    for number in range(1, 4):
        uploads = []
        for client, plan in enumerate(federation.plan.clients):
            x, y = federation.data.clients[client].features, federation.data.clients[client].targets
            x, here, key = (
                x.reshape(len(x), -1).astype(float),
                values.copy(),
                StreamKey(0, client, number),
            )
            batches = key.draw_batches(
                plan.release_as(DpSgdMechanism).sampling, len(x), first_step=2 * (number - 1)
            )
            noise, upload = key.noise(), np.zeros((2, P))
            for step in range(2):
                batch = next(batches)
                v = np.stack([direction(number, step, p) for p in range(P)])
                slopes = np.stack(
                    [
                        losses(here + RADIUS * each, x[batch], y[batch])
                        - losses(here - RADIUS * each, x[batch], y[batch])
                        for each in v
                    ],
                    axis=1,
                ) / (2 * RADIUS)
                norms = np.linalg.norm(slopes, axis=1, keepdims=True)
                total = (slopes * np.minimum(1, MARGIN * BOUND / np.maximum(norms, 1e-12))).sum(
                    axis=0
                )
                drawn = noise.fill_(torch.empty(P, dtype=torch.float64)).numpy() / 2**24
                upload[step] = -LR * (total + Z * BOUND * drawn) / 100
                here = here + upload[step] @ v
            uploads.append(upload)
        mean = np.mean(uploads, axis=0)
        history.append(mean)
        for step in range(2):
            for p in range(P):
                values += mean[step, p] * direction(number, step, p)
    return values, history


def test_rounds_are_those_of_a_few_lines_of_numpy(tmp_path: Path) -> None:
    from fedsim.experiment import load_experiment
    from fedsim.federation.assembly import assemble

    changes = ["model.name=./net.py:build", "model.args={}"]
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, 10, dtype=torch.float64)\n"
        "        nn.init.zeros_(self.layer.weight); nn.init.zeros_(self.layer.bias)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x.flatten(1).double())\n"
        "def build():\n"
        "    return Net()\n"
    )
    result = run(tmp_path, *changes)
    federation = assemble(load_experiment(EXPERIMENT, changes, base=tmp_path), ledger=None)
    values, history = numpy_rounds(federation)
    stored = load_file(result.path / "checkpoint" / "model.safetensors")["coefficients"]
    assert stored.shape == (3, 2, P)
    np.testing.assert_allclose(stored, history, rtol=0, atol=1e-6 * np.abs(history).max())
    model = load_file(result.path / "model.safetensors")
    found = np.concatenate([model["layer.weight"].ravel(), model["layer.bias"]])
    np.testing.assert_allclose(found, values, rtol=0, atol=1e-6 * np.abs(values).max())


def test_an_upload_is_one_number_for_each_direction_and_the_charge_that_of_dp_sgd(
    tmp_path: Path,
) -> None:
    result = run(tmp_path)
    assert [row["traffic"]["up"] for row in result.rounds] == [3 * 4 * 2 * P] * 3
    directory = RunDirectory(result.path)
    assert verify_run(directory).problems == ()
    assert replay_run(directory, base=tmp_path).problems == ()
    spent = directory.read_json("privacy.json")["clients"][0]
    ((event, count),) = PrivacyLedger.from_list(spent["ledger"]).entries
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, Gaussian)
    assert (event.sampling_rate, count) == (pytest.approx(100 / spent["examples"]), 6)
    assert event.event.noise_multiplier == pytest.approx(Z, rel=2e-3)
    accountant = PldAccountant()
    accountant.compose(event, count)
    assert spent["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    again = run(tmp_path, "federation.rounds=4", resume=True)
    assert len(again.rounds) == 4
    assert verify_run(directory).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        [
            "secure_aggregation={protocol: additive, min_clients: 3}",
            "privacy.trust=distributed",
            "local.steps=1",
        ],
        ["privacy.trust=central", "local.steps=1"],
        ["privacy.unit=client", "privacy.max_grad_norm=null", "privacy.max_update_norm=0.1"],
        ["privacy.clipping=adaptive"],
        ["local.max_physical_batch=16", "local.augmentation_multiplicity=2"],
        ["faults=[{kind: dropout_before, probability: 0.9}]", "federation.min_participants=0"],
    ],
)
def test_slopes_go_with_sums_and_units(tmp_path: Path, changes: list[str]) -> None:
    result = run(tmp_path, *changes)
    directory = RunDirectory(result.path)
    assert verify_run(directory).problems == ()
    assert replay_run(directory, base=tmp_path).problems == ()
    stored = load_file(result.path / "checkpoint" / "model.safetensors")["coefficients"]
    assert len(stored) == 3  # also of rounds without an update


@pytest.mark.slow
def test_the_sum_of_all_coefficients_hides_each_and_its_noise_is_that_of_the_charge(
    tmp_path: Path,
) -> None:
    changes = ["local.steps=1", "local.gradient.directions=512", "local.optimizer.lr=1"]
    sums = ["secure_aggregation={protocol: additive, min_clients: 3}", "privacy.trust=distributed"]
    result = run(tmp_path, *changes, *sums, "privacy.noise_multiplier=30")
    stored = load_file(result.path / "checkpoint" / "model.safetensors")["coefficients"]
    noise = result.rounds[0]["noise_norm"]
    assert np.linalg.norm(stored[0]) == pytest.approx(noise, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("local.optimizer.momentum=0.9", "sgd without momentum and weight_decay"),
        ("federation.strategy=fedadam", "only means of one round's coefficients"),
        ("federation.ema_decay=0.9", "remove ema_decay"),
        ("privacy.clipping=per_layer", "directions have no layers"),
        (
            "local={epochs: 1, batch_size: 9, gradient: {name: zeroth_order}}",
            "same number of steps",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path, change, message) -> None:
    with pytest.raises(ExperimentError, match=message):
        run(tmp_path, change)


MEMORY = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
from fedsim.clients.gradients.slopes import Slopes
from fedsim.zeroth_order.directions import Directions
from fedsim.zeroth_order.settings import ZerothOrderSettings
model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.Tanh())))
loss = lambda out, y: out.square().sum(1)
x, y = torch.randn(8192, 256), torch.zeros(8192)
size = sum(p.numel() for p in model.parameters())
def peak():  # of this program alone; ru_maxrss begins at what the parent had
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
if sys.argv[1] == "slopes":
    slopes = Slopes(model, loss, Directions(0, size, ZerothOrderSettings(name="zeroth_order")))
    slopes.begin_step(1, 0, torch.zeros(1, 1)); slopes.slopes(x[:64], y[:64]); before = peak()
    slopes.slopes(x, y)
else:
    loss(model(x[:64]), y[:64]).mean().backward(); before = peak()
    loss(model(x), y).mean().backward()
print(peak() - before)
"""


@pytest.mark.slow
def test_slopes_need_the_memory_of_one_forward_pass() -> None:
    found = {
        kind: float(subprocess.check_output([sys.executable, "-c", MEMORY, kind], text=True))
        for kind in ("slopes", "backward")
    }
    # 8 MB for each activation: backward keeps 24 layers of two, a forward pass two or three.
    assert found["slopes"] < 0.3 * found["backward"], found


def test_a_first_round_without_updates_is_no_sign_of_a_model_that_cannot_move(
    tmp_path: Path,
) -> None:
    gone = "faults=[{kind: dropout_before, rounds: [1], clients: [0, 1, 2]}]"
    first, *_ = run(tmp_path, "federation.min_participants=0", gone).rounds
    assert first["participants"] == []
    assert "unmoved" not in first
