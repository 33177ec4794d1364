"""A file that lost its end is never a federation without differential privacy."""

from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fedsim.experiment import ExperimentError, load_experiment

FILE = """\
name: cut
data: {dataset: digits, partition: {scheme: iid, num_clients: 2}}
model: {name: logistic}
federation: {rounds: 1}
local: {steps: 1, batch_size: 8}
privacy:
  noise_multiplier: 1.0
  delta: 1.0e-3
  max_grad_norm: 0.5
"""
BEFORE, _, _ = FILE.partition("privacy:")
BOTH_WAYS = "`privacy: {target_epsilon: ..., delta: ...}`, or `privacy: null`"


def test_no_prefix_of_a_private_file_is_a_run_without_privacy(tmp_path: Path) -> None:
    """Every possible cut of the file, as a copy that was interrupted leaves it."""
    path = tmp_path / "cut.yaml"
    for end in range(len(FILE)):
        path.write_text(FILE[:end])
        with suppress(ExperimentError):
            assert load_experiment(path).experiment.privacy is not None, end


@pytest.mark.parametrize("cut", [BEFORE, f"{BEFORE}privacy:\n", f"{BEFORE}privacy:\n#  delta: 1\n"])
def test_a_file_without_privacy_is_refused_with_both_ways(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.yaml"
    path.write_text(cut)
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}:{6 if 'privacy' in cut else 1}:1: privacy: ")
    assert BOTH_WAYS in line


def test_a_mapping_without_privacy_is_refused() -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(yaml.safe_load(BEFORE))
    assert BOTH_WAYS in str(caught.value)


def test_an_override_may_write_the_key() -> None:
    plain = load_experiment(yaml.safe_load(BEFORE), ["privacy=null"]).experiment
    assert plain.privacy is None
