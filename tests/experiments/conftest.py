"""What the tests of shipped experiments share."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fedsim.runs.runner import run_experiment

Accuracies = Callable[..., list[float]]


@pytest.fixture
def accuracies(tmp_path: Path) -> Accuracies:
    """Run an experiment with several seeds, without reports; return a metric of each run.

    `(experiment, seeds, metric="test_accuracy", **changes) -> metrics`; a dot in the path of a
    change is written as two underscores.
    """

    def run(
        experiment: Path, seeds: Iterable[int], metric: str = "test_accuracy", **changes: Any
    ) -> list[float]:
        overrides = {key.replace("__", "."): value for key, value in changes.items()}
        found = []
        for seed in seeds:
            out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
            result = run_experiment(experiment, overrides={**overrides, "seed": seed}, out=out)
            found.append(result.metrics[metric])
        return found

    return run
