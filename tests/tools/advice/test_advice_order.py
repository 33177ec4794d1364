"""The advice puts candidates into the order of their measured accuracy.

`benchmarks/advice.py` measured 20 generated federations; the record is in the repository. The
predictions are computed anew, so that a change of the noise model is tested, and candidates of one
federation are run again, so that the record is.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedsim.tools.advice.candidates import changes_of, public_facts
from fedsim.tools.advice.ranking import Ranking

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RECORD = BENCHMARKS / "results" / "2026-11-23-advice.json"
RUN_AGAIN, SHOWN = 0, 2
ACCURACY = 0.03  # of runs on processors that add numbers in another order


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not RECORD.exists():
        pytest.skip("imports a script of a checkout")
    monkeypatch.syspath_prepend(BENCHMARKS)
    name = "benchmark_of_advice"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / "advice.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def measured() -> list[dict[str, Any]]:
    return json.loads(RECORD.read_text())["federations"]


@pytest.mark.slow
def test_predicted_and_measured_order_agree(script: ModuleType) -> None:
    correlations = []
    for one in measured():
        assert one["experiment"] == script.generated(one["number"])
        federation = script.federation_of(one["experiment"])
        ranking = Ranking(federation, public_facts(federation))
        drawn = script.drawn_candidates(ranking, one["number"])
        rows = one["candidates"]
        settings = [changes_of(c, federation.experiment, ranking.facts) for c in drawn]
        assert settings == [row["changes"] for row in rows]
        predicted = [script.predicted_error(ranking, candidate) for candidate in drawn]
        correlations.append(script.rank_correlation(predicted, [r["accuracy"] for r in rows]))
    assert len(correlations) == 20
    assert np.mean(correlations) >= script.GOAL


@pytest.mark.slow
def test_the_recorded_accuracies_are_those_of_runs(script: ModuleType) -> None:
    one = measured()[RUN_AGAIN]
    for row in one["candidates"][:SHOWN]:
        again = script.accuracy(one["experiment"], row["changes"])
        assert again == pytest.approx(row["accuracy"], abs=ACCURACY)
