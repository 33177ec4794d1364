"""A moved key is an error that names the new place, wherever it is written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.algorithms.algorithm import algorithms
from fedsim.comparison.load import load_comparison
from fedsim.comparison.settings import ComparisonSettings
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.experiment.messages import MOVED_KEYS
from fedsim.experiment.schema import Experiment
from fedsim.experiment.shapes import Shape, keys_of, shape_of

OLD_TEXT = "  strategy: {name: fedadam, lr: 0.1}\n  rounds: 4"
COMPARISON = """\
base: exp.yaml
seeds: 1
baseline: a
variants:
  a: {}
  b: {federation.strategy: {name: fedadam, lr: 0.1}}
"""
MOVED = "federation.strategy.lr: moved; write federation.strategy.server_lr"


def is_key(dotted: str) -> bool:
    """Whether an experiment file or a comparison file has a key, in any kind of its sections."""
    *sections, name = dotted.split(".")
    if sections == ["federation", "strategy"]:
        return any(name in kind.Options.model_fields for kind in algorithms().values())
    shape: Shape = ComparisonSettings if sections[0] == "select" else Experiment
    for section in sections:
        shape = shape_of(keys_of(shape)[section])
    return name in keys_of(shape)


@pytest.mark.parametrize("old", MOVED_KEYS)
def test_the_new_place_is_a_key_and_no_key_that_moved_itself(old: str) -> None:
    assert is_key(MOVED_KEYS[old])
    assert MOVED_KEYS[old] not in MOVED_KEYS


def test_an_old_key_of_a_file_is_reported_at_its_line(
    write: Callable[[str], Path], good: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good.replace("  rounds: 4", OLD_TEXT)))
    assert str(caught.value) == f"exp.yaml:11:29: {MOVED}"


def test_an_old_key_of_the_command_line_too(write: Callable[[str], Path], good: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good), ["federation.strategy={name: fedadam, lr: 0.1}"])
    assert str(caught.value) == f"command line: {MOVED}"


def test_an_old_key_of_a_variant_too(write: Callable[[str], Path], good: str) -> None:
    write(good)
    Path("compare.yaml").write_text(COMPARISON)
    with pytest.raises(ExperimentError) as caught:
        load_comparison("compare.yaml")
    assert str(caught.value) == f"compare.yaml:6:44: variants.b.{MOVED}"


def test_a_section_without_the_new_key_does_not_name_it(
    write: Callable[[str], Path], good: str
) -> None:
    text = good.replace("  rounds: 4", OLD_TEXT.replace("fedadam", "krum"))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(text))
    assert str(caught.value) == "exp.yaml:11:26: federation.strategy.lr: unknown key"


@pytest.mark.parametrize(
    ("setting", "new"),
    [
        ("local.augmentations=2", "local.augmentation_multiplicity"),
        ("model.features=[orientations]", "hog"),
        ("federation.weighting=noise", "examples_over_noise"),
    ],
)
def test_an_old_name_in_an_old_place_names_the_new_one(
    setting: str, new: str, write: Callable[[str], Path], good: str
) -> None:
    with pytest.raises(ExperimentError, match=new):
        load_experiment(write(good), [setting])
