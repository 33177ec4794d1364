"""An engineer with an Opacus script changes its import lines, and then makes it an experiment."""

import re

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

pytestmark = pytest.mark.slow

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


def figures_of_models(text: str) -> list[dict[str, float]]:
    """Return the figures of the last two lines, of the MLP and the CNN."""
    return [figures(line) for line in text.strip().splitlines()[-2:]]


def ported(script: str) -> str:
    text, count = re.subn(r"from opacus import PrivacyEngine", NEW_IMPORT, script)
    assert count == 1
    return text


def test_a_script_of_opacus_trains_here_with_the_same_epsilon(journey) -> None:
    """The page's script runs under Opacus, and with both diffs here; test_howto.py has the rest."""
    journey.write_page("docs/start/from_opacus.md")
    before = figures_of_models(journey.type("python train.py").stdout)
    journey.type("git apply engine.diff experiment.diff")
    after = figures_of_models(journey.type("python train.py").stdout)
    for old, new in zip(before, after, strict=True):
        assert new["epsilon"] == pytest.approx(old["epsilon"], rel=0.01)
        assert new["accuracy"] > max(0.75, old["accuracy"] - 0.08)


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
