"""Both certificates of a run are charged before the upload, and neither can be made smaller.

A forger computes chains, ε, words and the manifest anew. A reader needs ledger.jsonl alone.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

if TYPE_CHECKING:
    from forger import Forger
else:  # beside this file; the tests are no package
    _SPEC = spec_from_file_location("forger", Path(__file__).with_name("forger.py"))
    _MODULE = module_from_spec(_SPEC)
    _SPEC.loader.exec_module(_MODULE)
    Forger = _MODULE.Forger


MIN_CLIENTS, ROUNDS, DELTA = 4, 3, 1e-3
HONEST = MIN_CLIENTS - 1
EXPERIMENT: dict[str, Any] = {
    "name": "both",
    "data": {"dataset": "digits", "partition": {"scheme": "dirichlet", "num_clients": 5}},
    "model": {"name": "logistic"},
    "federation": {"rounds": ROUNDS},
    "local": {"steps": 1, "batch_size": 64},
    "privacy": {
        "trust": "distributed",
        "target_epsilon": 2.0,
        "delta": DELTA,
        "max_grad_norm": 0.5,
    },
    "secure_aggregation": {"min_clients": MIN_CLIENTS},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(EXPERIMENT, out=tmp_path_factory.mktemp("both") / "r").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


def test_a_whole_run_is_sound_and_names_both(finished: Path) -> None:
    assert verify_run(RunDirectory.open(finished)).problems == ()
    privacy = json.loads((finished / "privacy.json").read_text())
    sums, server = privacy["certificates"]
    assert (sums["against"], server["against"]) == ("sums", "server")
    assert sums["epsilon"] == privacy["system_epsilon"]
    assert 1.99 < sums["epsilon"] <= 2.0 < server["epsilon"]
    assert server["epsilon"] == max(row["epsilon_against_server"] for row in privacy["clients"])
    table = (finished / "clients.csv").read_text().splitlines()
    assert table[0].endswith("against,epsilon_against_server")
    assert all(",sums," in line for line in table[1:])


@pytest.mark.slow
def test_both_are_recomputed_from_the_ledger_alone_with_another_library(finished: Path) -> None:
    """dp-accounting knows neither the slack of the sampler nor fedsim: both are below 1e-3."""
    dp = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    privacy = json.loads((finished / "privacy.json").read_text())
    records = [json.loads(line) for line in (finished / "ledger.jsonl").open()]
    names = {"ledger": "epsilon", "against_server": "epsilon_against_server"}
    for row in privacy["clients"][:1]:  # dp-accounting is slow
        for key, name in names.items():
            accountant = pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
            events = Counter[tuple[float, float]]()
            for record in records:
                if record["client"] == row["client"]:
                    ((entry),) = record[key]
                    event, inner = entry["event"], entry["event"]["event"]
                    place = event["sampling_rate"], inner["noise_multiplier"]
                    events[place] += entry["count"]
            for (rate, noise), count in events.items():
                sampled = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
                accountant.compose(sampled, count)
            assert accountant.get_epsilon(DELTA) == pytest.approx(row[name], abs=1e-3)


def weaken(key: str, factor: float) -> Callable[[Forger], None]:
    """Multiply the noise of one ledger in every record."""

    def forge(forger: Forger) -> None:
        for one in forger.charges:
            one[key][0]["event"]["event"]["noise_multiplier"] *= factor

    return forge


def claim_more_colluders_hide(forger: Forger) -> None:
    """Claim the noise of one more honest client, in ledger and figures."""
    factor = math.sqrt((HONEST + 1) / HONEST)
    weaken("ledger", factor)(forger)
    for row in forger.privacy["clients"]:
        row["noise_multiplier"] *= factor
    forger.privacy["sums"]["colluding_clients"] = 0


def drop_the_second_ledger(forger: Forger) -> None:
    for one in forger.charges:
        del one["against_server"]


def drop_it_in_one_record(forger: Forger) -> None:
    del forger.charges[0]["against_server"]


def pass_for_local_trust(forger: Forger) -> None:
    drop_the_second_ledger(forger)
    forger.privacy |= {"trust": "local"}
    del forger.privacy["sums"]
    for row in forger.privacy["clients"]:
        del row["ledger_against_server"], row["epsilon_against_server"]


FORGERIES: dict[str, tuple[Callable[[Forger], None], str]] = {
    "more noise in the shares": (weaken("against_server", 2.0), "charge against the server that"),
    "more noise in the sums": (weaken("ledger", 1.5), "is not the charge that experiment.yaml"),
    "one more honest client": (claim_more_colluders_hide, "sums is {'min_clients'"),
    "no second ledger": (drop_the_second_ledger, "a record without a charge against the server"),
    "one record without it": (drop_it_in_one_record, "a record without a charge against the"),
    "local trust": (pass_for_local_trust, "trust is local in privacy.json and distributed"),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "no second ledger" else pytest.param(name, marks=pytest.mark.slow)
        for name in FORGERIES
    ],
)
def test_a_smaller_certificate_is_found(run: Path, name: str) -> None:
    forge, said = FORGERIES[name]
    forger = Forger(run)
    forge(forger)
    assert said in forger.write()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["epsilon_against_server", "epsilon"])
def test_a_smaller_figure_is_found(run: Path, key: str) -> None:
    path = run / "privacy.json"
    content = json.loads(path.read_text())
    for row in content["clients"]:
        row[key] *= 0.5
    path.write_text(json.dumps(content))
    problems = " ".join(verify_run(RunDirectory.open(run)).problems)
    observer = " against the server" if key != "epsilon" else ""
    assert f"ε{observer} by pld is reported as" in problems
    assert "certificates does not follow from the figures" in problems
