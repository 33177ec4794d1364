"""A newcomer whose plain arm runs at the private arm's learning rate, and diverges."""

import html
import json
import re
import shlex

import pytest

from fedsim.comparison.statistics import CONFIDENCE

pytestmark = pytest.mark.slow

EXPERIMENT = """
name: tumours
data: {dataset: breast_cancer, partition: {scheme: iid, num_clients: 4}}
model: {name: mlp, args: {hidden: [16]}}
federation: {rounds: 6}
local: {steps: 4, batch_size: 32, optimizer: {name: sgd, lr: 8.0}}
privacy: {target_epsilon: 1.0, delta: 1.0e-3, max_grad_norm: 0.5}
"""
ARMS = """
base: tumours.yaml
seeds: 2
baseline: plain
variants:
  plain: {arm: plain}
  private: {}
"""
GAIN = re.compile(r"\+\d+\.\d( ± [\d.]+)? pp")


def page_text(path) -> str:
    """Return the text of a page without styles, scripts and drawings, with single spaces."""
    page = re.sub(r"(?s)<(style|script|svg).*?</\1>", "", path.read_text())
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def test_a_diverged_baseline_is_named_and_the_offered_command_tunes_it(journey) -> None:
    journey.write("tumours.yaml", EXPERIMENT)
    journey.write("arms.yaml", ARMS)
    done = journey.type("fedsim compare arms.yaml --out arms")
    first, offer, *_ = done.stdout.splitlines()
    assert "plain is no better than always answering “benign”" in first
    assert first.endswith("compare nothing with it.")
    assert not GAIN.search(done.stdout)
    text = page_text(journey.home / "arms/comparison.html")
    top = text[: text.index("What differs")]
    assert "plain is no better than always answering “benign”" in top
    assert "private minus plain no fair comparison" in top
    assert not GAIN.search(text)
    written = json.loads((journey.home / "arms/comparison.json").read_text())
    assert [entry["variant"] for entry in written["unfit"]] == ["plain"]
    assert [variant["private"] for variant in written["variants"]] == [False, True]

    command = offer.removeprefix("try: ")
    assert "--tune local.optimizer.lr" in command
    assert command == written["remedy"]
    assert shlex.split(command)[:2] == ["fedsim", "compare"]
    done = journey.type(command)
    assert "On charged data" in done.stdout
    tuned = json.loads((journey.home / "arms/comparison.json").read_text())
    assert tuned["unfit"] == []
    plain, private = tuned["variants"]
    assert plain["changes"]["local.optimizer.lr"] < 8.0
    assert plain["metrics"]["test_accuracy"]["mean"] > 0.8
    assert private["difference"]["mean"] < 0.1
    assert tuned["confidence"] == CONFIDENCE
