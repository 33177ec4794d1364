"""The printed script does what it says: it recomputes ε from the ledger."""

import contextlib
import html
import io
import re

import pytest

from fedsim.report.contents import read_contents
from fedsim.report.html import recipe, write_report

GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1.0}
SAMPLED = {"type": "PoissonSampled", "sampling_rate": 0.01, "event": GAUSSIAN}


@pytest.fixture
def ledger_run(make_run, private_client):
    def make(*ledgers, delta=1e-5, epsilon=6.19):
        spends = [private_client(number, 100, epsilon, 5) for number in range(len(ledgers))]
        for spend, ledger in zip(spends, ledgers, strict=True):
            spend["ledger"], spend["delta"] = ledger, delta
        return make_run(clients=spends, rounds=5)

    return make


def test_script_in_the_report_recomputes_epsilon(ledger_run):
    pytest.importorskip("dp_accounting")
    # Two records of 5,000 steps; the exact ε of 10^4 steps is 6.19 (two independent methods).
    directory = ledger_run([{"event": SAMPLED, "count": 5000}, {"event": SAMPLED, "count": 5000}])
    write_report(directory)
    page = directory.report.read_text(encoding="utf-8")
    found = re.search(r"<code>(# pip install.*?)</code>", page, flags=re.DOTALL)
    assert found is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(html.unescape(found[1]), {})
    assert float(printed.getvalue()) == pytest.approx(6.19, abs=0.01)


def test_equal_events_are_one_line_and_numbers_are_complete(ledger_run):
    event = {**SAMPLED, "sampling_rate": 1 / 3}
    directory = ledger_run([{"event": event, "count": 2}, {"event": event, "count": 3}])
    found = recipe(read_contents(directory))
    assert found is not None
    line = "compose(dp.PoissonSampledDpEvent(0.3333333333333333, dp.GaussianDpEvent(1.0)), 5)"
    assert found["script"].count("compose(") == 1
    assert line in found["script"]


def test_script_is_for_the_client_with_the_largest_epsilon(make_run, private_client):
    spends = [private_client(n, 100, epsilon, 5) for n, epsilon in enumerate((1.0, 3.0, 2.0, 3.0))]
    found = recipe(read_contents(make_run(clients=spends, rounds=5)))
    assert found is not None
    assert found["client"] == 1
    assert found["ledger_head"] == spends[1]["ledger_head"]


@pytest.mark.parametrize(
    ("event", "expression"),
    [
        (
            {"type": "SelfComposed", "event": GAUSSIAN, "count": 3},
            "dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), 3)",
        ),
        (
            {"type": "Composed", "events": [GAUSSIAN, GAUSSIAN]},
            "dp.ComposedDpEvent([dp.GaussianDpEvent(1.0), dp.GaussianDpEvent(1.0)])",
        ),
        (
            {"type": "JointGaussian", "noise_multipliers": [1.5, 2.0]},
            "dp.GaussianDpEvent((1.5**-2 + 2.0**-2)**-0.5)",
        ),
        ({"type": "JointGaussian", "noise_multipliers": [1.5, 0.0]}, "dp.GaussianDpEvent(0.0)"),
        ({"type": "EpochShuffled", "batches": 9, "event": GAUSSIAN}, "dp.GaussianDpEvent(1.0)"),
        ({"type": "NonPrivate"}, "dp.NonPrivateDpEvent()"),
    ],
)
def test_other_events_have_their_counterparts(ledger_run, event, expression):
    found = recipe(read_contents(ledger_run([{"event": event, "count": 1}])))
    assert found is not None
    assert f"accountant.compose({expression}, 1)" in found["script"]


@pytest.mark.parametrize(
    "ledger",
    [
        pytest.param([], id="nothing spent"),
        pytest.param([{"event": {"type": "Unheard"}, "count": 1}], id="unknown event"),
        pytest.param(
            [
                {"event": {"type": "Gaussian", "noise_multiplier": 1 + n / 100}, "count": 1}
                for n in range(41)
            ],
            id="too many events",
        ),
    ],
)
def test_without_a_script_the_report_points_to_the_ledger(ledger_run, ledger):
    directory = ledger_run(ledger)
    write_report(directory)
    page = directory.report.read_text(encoding="utf-8")
    assert recipe(read_contents(directory)) is None
    assert "There is no short script" in page
    assert "ledger.jsonl" in page


def test_neighbours_that_the_library_lacks_are_a_reason_for_no_script(make_run):
    directory = make_run()
    privacy = directory.read_json("privacy.json")
    directory.write_json("privacy.json", {**privacy, "adjacency": "replace_one"})
    write_report(directory)
    page = directory.report.read_text(encoding="utf-8")
    assert "has no counterpart of an event or of the neighbours" in page


def test_plain_federation_has_nothing_to_recompute(make_run):
    assert recipe(read_contents(make_run(private=False))) is None
