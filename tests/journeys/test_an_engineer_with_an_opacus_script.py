"""An engineer with an Opacus script changes its import line, and keeps the rest."""

import re

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x = torch.tensor(x / 16, dtype=torch.float32)
y = torch.tensor(y)
data = TensorDataset(x[:1500], y[:1500])
loader = DataLoader(data, batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
criterion = nn.CrossEntropyLoss()

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier=1.1, max_grad_norm=1.0,
)
steps = 0
for epoch in range(8):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        steps += 1
with torch.no_grad():
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
print(f"steps {steps} epsilon {engine.get_epsilon(1e-5):.4f} accuracy {accuracy:.4f}")
"""

FIRST_OPACUS = """
import torch
from torch import nn
from opacus import PrivacyEngine

torch.manual_seed(0)
model = nn.Linear(20, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
privacy_engine = PrivacyEngine(
    model,
    batch_size=64,
    sample_size=6400,
    alphas=[1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64)),
    noise_multiplier=1.3,
    max_grad_norm=1.0,
)
privacy_engine.attach(optimizer)
for _ in range(20):
    optimizer.zero_grad()
    inputs, targets = torch.randn(64, 20), torch.randint(2, (64,))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
epsilon, best_alpha = optimizer.privacy_engine.get_privacy_spent(1e-5)
print(f"epsilon {epsilon:.4f} alpha {best_alpha}")
"""
NEW_IMPORT = "from fedsim.clients import PrivacyEngine"


def figures(text: str) -> dict[str, float]:
    """Return the numbers of the last line of a script's output, by the word before each."""
    words = text.strip().splitlines()[-1].split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def ported(script: str) -> str:
    text, count = re.subn(r"from opacus import PrivacyEngine", NEW_IMPORT, script)
    assert count == 1
    return text


def test_a_script_is_ported_by_its_import_line(journey) -> None:
    journey.write("before.py", SCRIPT)
    journey.write("after.py", ported(SCRIPT))
    before = figures(journey.type("python before.py").stdout)
    after = figures(journey.type("python after.py").stdout)
    assert after["steps"] == before["steps"]
    assert after["epsilon"] == pytest.approx(before["epsilon"], rel=0.01)
    assert after["accuracy"] > 0.75
    assert after["accuracy"] > before["accuracy"] - 0.06


@pytest.mark.parametrize("poisson", [False, True])
def test_the_first_opacus_runs_as_its_articles_print_it(journey, poisson: bool) -> None:
    """Batches that nobody drew at random are charged without amplification, and stderr says why."""
    script = ported(FIRST_OPACUS)
    if poisson:
        script = script.replace("max_grad_norm=1.0,", "max_grad_norm=1.0, batches='poisson',")
        drawn = "size = int((torch.rand(6400) < 0.01).sum())\n    inputs, targets ="
        script = script.replace("inputs, targets =", drawn).replace("(64,", "(size,")
    journey.write("first.py", script)
    done = journey.type("python first.py")
    assert ("batches='poisson'" in done.stderr) == (not poisson)
    step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(1.3)
    if poisson:
        step = dp_accounting.PoissonSampledDpEvent(0.01, step)
    accountant = RdpAccountant([1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64)))
    epsilon, order = accountant.compose(step, 20).get_epsilon_and_optimal_order(1e-5)
    found = figures(done.stdout)
    assert found["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert found["alpha"] == order
