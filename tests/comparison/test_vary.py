"""`--vary`: values on the command line become the variants of a comparison file."""

from pathlib import Path

import pytest

from fedsim.comparison.comparison_result import write_settings
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.comparison.vary import load_varied, parse_vary
from fedsim.experiment import ExperimentError


def varied(directory: Path, *texts: str, **changes: object) -> LoadedComparison:
    overrides = changes.pop("overrides", ())
    return load_varied(
        directory / "tiny.yaml",
        parse_vary(texts),
        overrides=overrides,  # type: ignore[arg-type]
        changes={"seeds": 2, **changes},
    )


def mistakes(directory: Path, *texts: str, **changes: object) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        varied(directory, *texts, **changes)
    return [line.replace(f"{directory}/", "") for line in str(caught.value).splitlines()]


def test_a_null_target_is_without_privacy_and_the_first_value_the_baseline(
    directory: Path,
) -> None:
    loaded = varied(directory, "privacy.target_epsilon=null,8,2")
    assert loaded.name == "tiny-by-target_epsilon"
    assert [one.name for one in loaded.variants] == [
        "target_epsilon=null",
        "target_epsilon=8",
        "target_epsilon=2",
    ]
    assert [bool(one.experiment.not_private) for one in loaded.variants] == [True, False, False]
    assert loaded.baseline == "target_epsilon=null"
    assert loaded.seeds == (0, 1)
    privacy = loaded.variants[2].experiment.privacy
    assert privacy is not None
    assert (privacy.target_epsilon, privacy.delta) == (2.0, 1e-4)


def test_several_keys_give_every_combination_and_equal_ones_once(directory: Path) -> None:
    loaded = varied(
        directory,
        "privacy.target_epsilon=null,8",
        "privacy.max_grad_norm=0.5,1",
        "local.steps=1,2",
        baseline="target_epsilon=8-max_grad_norm=1-steps=2",
    )
    # Without privacy there is no clipping bound to vary.
    assert [one.name for one in loaded.variants] == [
        "target_epsilon=null-steps=1",
        "target_epsilon=null-steps=2",
        *(
            f"target_epsilon=8-max_grad_norm={bound}-steps={steps}"
            for bound in ("0.5", "1")
            for steps in (1, 2)
        ),
    ]
    assert loaded.baseline == "target_epsilon=8-max_grad_norm=1-steps=2"


def test_a_target_takes_the_place_of_a_given_noise_multiplier(directory: Path) -> None:
    source = directory / "tiny.yaml"
    source.write_text(source.read_text().replace("target_epsilon: 8.0", "noise_multiplier: 1.1"))
    loaded = varied(directory, "privacy.target_epsilon=null,8", overrides=["federation.rounds=1"])
    plain, dp = (one.experiment for one in loaded.variants)
    assert plain.privacy is None
    assert dp.privacy is not None
    assert (dp.privacy.target_epsilon, dp.privacy.noise_multiplier) == (8.0, None)
    assert {plain.federation.rounds, dp.federation.rounds} == {1}


def test_values_are_read_as_yaml(directory: Path) -> None:
    assert parse_vary(["a.b=[1, 2],{name: adam, lr: 0.1},x", "c=null"]) == {
        "a.b": [[1, 2], {"name": "adam", "lr": 0.1}, "x"],
        "c": [None],
    }
    loaded = varied(directory, "local.optimizer={name: sgd, lr: 1},{name: adam, lr: 0.1}")
    assert [one.experiment.local.optimizer.name for one in loaded.variants] == [
        "sgd",
        "adam",
    ]


def test_the_file_in_the_output_gives_the_same_comparison_again(directory: Path) -> None:
    loaded = varied(directory, "privacy.target_epsilon=null,8", "local.steps=1,2")
    write_settings(loaded, directory / "comparison.yaml")
    again = load_comparison(directory / "comparison.yaml")
    assert again.variants == loaded.variants
    assert (again.name, again.seeds, again.baseline) == (
        loaded.name,
        loaded.seeds,
        loaded.baseline,
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["local.steps"], "--vary 'local.steps' has no values; write --vary key.path=value,value"),
        (["privcy.delta=1e-5,1e-6"], "privcy: unknown key; did you mean 'privacy'?"),
        (["local.steps=1,1"], "local.steps: 1 is given twice"),
        (["local.steps=1,2", "local.steps=3,4"], "is given twice by --vary"),
        (["seed=1,2"], "seed: every variant runs with every seed; use --seeds"),
        (["privacy.target_epsilon=8,-1"], "privacy.target_epsilon: must be > 0, got -1"),
        (["local.steps=1"], "there must be at least two variants to compare"),
        (
            [f"local.steps={','.join(map(str, range(1, 20)))}", "federation.rounds=1,2,3,4,5,6"],
            "--vary gives 114 variants, at most 100 are allowed",
        ),
        (
            ["privacy.target_epsilon=8,2", "privacy.noise_multiplier=1,2"],
            "exclude each other: vary one",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_as_it_was_given(
    directory: Path, texts: list[str], message: str
) -> None:
    (found,) = mistakes(directory, *texts)
    assert found.startswith("command line: ")
    assert message in found


def test_a_baseline_that_is_no_variant_is_refused(directory: Path) -> None:
    (found,) = mistakes(directory, "local.steps=1,2", baseline="steps=3")
    assert "there is no variant 'steps=3'; did you mean 'steps=" in found


def test_an_experiment_and_a_comparison_are_told_apart(directory: Path) -> None:
    with pytest.raises(ExperimentError, match="this is an experiment, not a comparison: add"):
        load_comparison(directory / "tiny.yaml")
    with pytest.raises(ExperimentError, match="this is a comparison, which has variants of its"):
        load_varied(directory / "compare.yaml", {"local.steps": [1, 2]}, changes={"seeds": 1})
