"""The benchmark runs, and a trick that is taken out changes no result but its last bits."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from fedsim.clients.clipping.clipping import LayerClipping
from fedsim.clients.gradients.per_example import BatchStatistics
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.models.losses import cross_entropy


@pytest.mark.slow  # no guarantee rests on it
def test_the_benchmark_prints_and_writes_ratios(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["tricks.py", "--quick", "--json", str(out)])
    script("tricks").main()
    printed = capsys.readouterr().out
    numbers = json.loads(out.read_text())["numbers"]
    assert len(numbers) == 3
    assert all(number["low"] <= number["value"] <= number["high"] for number in numbers)
    assert all(number["case"] in printed for number in numbers)


def test_without_a_trick_the_sums_are_the_same(
    script: Callable[[str], ModuleType], add_clipped_sum: Callable[..., BatchStatistics]
) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 3),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    x, y = torch.randn(5, 2, 8, 8, generator=generator), torch.tensor([0, 1, 2, 0, 1])

    def summed() -> torch.Tensor:
        gradients = RuleGradients(model, cross_entropy)
        clipping = LayerClipping(1.0)
        into = torch.zeros(gradients.parameters.size, dtype=torch.float64)
        groups = clipping.groups(gradients.parameters)
        add_clipped_sum(gradients, x, y, clipping, groups, into)
        return into

    expected = summed()
    for trick in script("tricks").TRICKS:
        with trick.without():
            torch.testing.assert_close(summed(), expected, rtol=1e-4, atol=1e-6)
