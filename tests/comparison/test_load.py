"""A comparison file is read strictly: every mistake of every variant, each at its place."""

from pathlib import Path

import pytest

from fedsim.comparison.comparison_result import write_settings
from fedsim.comparison.load import LoadedComparison, load_comparison
from fedsim.experiment import ExperimentError


def load(directory: Path, text: str) -> LoadedComparison:
    (directory / "compare.yaml").write_text(text)
    return load_comparison(directory / "compare.yaml")


def mistakes(directory: Path, text: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        load(directory, text)
    return [line.replace(f"{directory}/", "") for line in str(caught.value).splitlines()]


def test_every_variant_is_the_base_with_its_changes_and_every_seed(directory: Path) -> None:
    loaded = load_comparison(directory / "compare.yaml")
    assert loaded.name == "compare"
    assert loaded.seeds == (0, 1)
    plain, private = loaded.variants
    assert [plain.with_seed(seed).experiment.seed for seed in loaded.seeds] == [0, 1]
    assert plain.experiment.privacy is None
    assert plain.experiment.not_private
    assert not private.experiment.not_private
    assert private.experiment.privacy is not None
    assert (plain.changes, private.changes) == ({"privacy": None}, {})


def test_nested_mappings_and_dotted_keys_are_merged_into_the_base(directory: Path) -> None:
    loaded = load(
        directory,
        """\
base: tiny.yaml
seeds: [7]
baseline: nested
variants:
  nested: {privacy: {delta: 1e-5}, local: {steps: 3}}
  dotted: {privacy.delta: 1e-5, local.steps: 3}
  mixed: {privacy.clients: {"2": {target_epsilon: 1.0}}, local: {optimizer: {name: adam}}}
""",
    )
    nested, dotted, mixed = (one.experiment for one in loaded.variants)
    assert nested == dotted
    assert nested.privacy is not None
    assert (nested.privacy.delta, nested.privacy.target_epsilon) == (1e-5, 8.0)
    assert mixed.privacy is not None
    assert mixed.privacy.clients["2"].target_epsilon == 1.0
    assert (mixed.local.optimizer.name, mixed.local.optimizer.lr) == ("adam", 0.5)


def test_a_mapping_takes_the_place_of_a_plain_value(directory: Path) -> None:
    (directory / "table.csv").write_text("a,y\n1,0\n2,1\n")
    loaded = load(
        directory,
        """\
base: tiny.yaml
seeds: 1
baseline: digits
variants:
  digits: {}
  table: {data: {dataset: {path: table.csv, target: y}}}
""",
    )
    assert loaded.variants[1].changes == {"data.dataset": {"path": "table.csv", "target": "y"}}


def test_a_grid_is_every_combination_with_a_name_for_each(directory: Path) -> None:
    loaded = load(
        directory,
        """\
base: tiny.yaml
seeds: 1
baseline: plain
variants:
  plain: {privacy: null}
  dp:
    local.batch_size: 16
    grid:
      privacy.target_epsilon: [8, 2.5]
      local.steps: [1, 5]
      local.optimizer.lr: [0.1]
""",
    )
    assert [one.name for one in loaded.variants] == [
        "plain",
        "dp-target_epsilon=8-steps=1-lr=0.1",
        "dp-target_epsilon=8-steps=5-lr=0.1",
        "dp-target_epsilon=2.5-steps=1-lr=0.1",
        "dp-target_epsilon=2.5-steps=5-lr=0.1",
    ]
    last = loaded.variants[-1].experiment
    assert (last.local.batch_size, last.local.steps) == (16, 5)


def test_a_grid_may_be_of_lists_and_of_whole_sections(directory: Path) -> None:
    loaded = load(
        directory,
        """\
base: tiny.yaml
seeds: 1
baseline: wide-hidden=8
variants:
  wide: {model.name: mlp, grid: {model.args.hidden: [[8], [64, 32]]}}
  model: {grid: {model: [{name: logistic}, {name: mlp}]}}
  amount: {grid: {privacy.clients.0.target_epsilon: [1], privacy.target_epsilon: [2]}}
""",
    )
    assert [one.name for one in loaded.variants] == [
        "wide-hidden=8",
        "wide-hidden=64x32",
        "model-model=0",
        "model-model=1",
        "amount-privacy.clients.0.target_epsilon=1-privacy.target_epsilon=2",
    ]
    assert loaded.variants[3].experiment.model.name == "mlp"


BROKEN = """\
base: tiny.yaml
seeds: [0, 1, 1]
baseline: eps
metrik: 3
variants:
  plain: {privacy: null}
  eps:
    grid: {privacy.target_epsilon: [8, -4, 2], local.optimizer: {lr: [1]}}
  bad: {privcy.delta: 3, seed: 4}
  both: {privacy: {declared_examples: 5}}
  three: 3
  ":": {}
"""


def test_every_mistake_is_reported_at_once_at_its_place(directory: Path) -> None:
    assert mistakes(directory, BROKEN) == [
        "compare.yaml:2:1: seeds: seed 1 occurs twice: it would be the same run again",
        "compare.yaml:4:1: metrik: unknown key; did you mean 'metric'?",
        "compare.yaml:8:40: variants.eps.privacy.target_epsilon: must be > 0, got -4",
        "compare.yaml:8:48: variants.eps.grid.'local.optimizer': must be a list of values, got a "
        "mapping; write the whole key on one line: section.key: [...]",
        "compare.yaml:9:9: variants.bad.privcy: unknown key; did you mean 'privacy'?",
        "compare.yaml:9:26: variants.bad.seed: every variant runs with the seeds of seeds:; leave "
        "it out",
        "compare.yaml:10:20: variants.both.privacy.declared_examples: unknown key "
        "here; it belongs to privacy.adjacency",
        "compare.yaml:11:3: variants.three: must be a mapping of what to change, got 3",
        "compare.yaml:12:3: variants.':': a variant's name must be letters, digits, '.', '_', "
        "'+', '=' or '-', starting with a letter or a digit",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tiny.yaml", "tony.yaml", "base: no such file: "),
        ("seeds: 2", "seeds: 0", "seeds: must be 1 to 1000 seeds, got 0"),
        ("seeds: 2", "seeds: yes", "seeds: must be a whole number or a list of them, got 'yes'"),
        ("seeds: 2", "seeds: [-1]", "seeds: a seed must be a whole number from 0 to 2^63 - 1"),
        ("seeds: 2\n", "", "seeds: missing; number of seeds (0, 1, 2, ...), or a list of seeds"),
        ("baseline: plain", "baseline: plian", "no variant 'plian'; did you mean 'plain'?"),
        ("  dp: {}\n", "", "variants: there must be at least two variants to compare"),
        ("dp: {}", "PLAIN: {}", "'PLAIN' and 'plain' differ in capitals only"),
        ("dp: {}", "dp: {grid: 3}", "must map keys to lists of values"),
        ("dp: {}", "dp: {grid: {local.steps: 3}}", "must be a list of values, got 3"),
        ("dp: {}", "dp: {local: {steps: 3}, local.steps: 4}", "is set twice in this variant"),
        ("dp: {}", "dp: {local..steps: 4}", "is not a key; write key.path: value"),
        ("baseline: plain", "baseline: plain\nselect: {on: private}", "select.metric: missing"),
        (
            "client_metrics: true",
            "select: {metric: client_accuracy, on: public_test}",
            "select.metric: 'client_accuracy' needs client_metrics: true",
        ),
        (
            "baseline: plain",
            "baseline: plain\nselect: {metric: test_loss, on: private, among: [pd]}",
            "select.among.0: there is no variant 'pd'; did you mean 'dp'?",
        ),
    ],
)
def test_one_mistake_is_one_clear_line(directory: Path, old: str, new: str, expected: str) -> None:
    text = (directory / "compare.yaml").read_text()
    assert old in text
    found = mistakes(directory, text.replace(old, new))
    assert any(expected in line for line in found), found
    assert all(line.startswith(("compare.yaml:", "tiny.yaml:")) for line in found)


def test_a_baseline_that_names_a_grid_is_told_a_variant_of_it(directory: Path) -> None:
    text = (directory / "compare.yaml").read_text()
    text = text.replace("dp: {}", "dp: {grid: {local.steps: [1, 2]}}")
    (found,) = mistakes(directory, text.replace("baseline: plain", "baseline: dp"))
    assert found.endswith("'dp' is a grid: name one of its variants, such as 'dp-steps=1'")


def test_a_mistake_of_the_base_is_reported_once_and_one_of_a_variant_says_whose(
    directory: Path,
) -> None:
    base = (directory / "tiny.yaml").read_text()
    (directory / "tiny.yaml").write_text(base.replace("rounds: 2", "round: 2"))
    found = mistakes(directory, (directory / "compare.yaml").read_text())
    assert found == ["tiny.yaml:6:14: federation.round: unknown key; did you mean 'rounds'?"]
    (directory / "tiny.yaml").write_text(base.replace("delta: 1.0e-4", "delta: 7"))
    found = mistakes(directory, (directory / "compare.yaml").read_text())
    assert found == [
        "tiny.yaml:13:3: privacy.delta: must be < 1, got 7 (in variant 'dp')",
    ]


def test_a_selection_needs_a_private_candidate(directory: Path) -> None:
    text = (directory / "compare.yaml").read_text().replace("dp: {}", "b: {privacy: null}")
    (found,) = mistakes(directory, text + "select: {metric: test_loss, on: public_test}\n")
    assert "no variant has privacy; name the candidates in select.among" in found


def test_a_comparison_may_be_a_mapping(directory: Path) -> None:
    loaded = load_comparison(
        {
            "base": str(directory / "tiny.yaml"),
            "seeds": [3],
            "baseline": "a",
            "variants": {"a": None, "b": {"local": {"steps": 2}}},
        }
    )
    assert [one.experiment.local.steps for one in loaded.variants] == [1, 2]
    with pytest.raises(ExperimentError, match="locl: unknown key; did you mean 'local'"):
        load_comparison(
            {
                "base": str(directory / "tiny.yaml"),
                "seeds": [3],
                "baseline": "a",
                "variants": {"a": None, "b": {"locl": {"steps": 2}}},
            }
        )


ARMS = """\
base: tiny.yaml
baseline: plain
seeds: 1
variants:
  plain: {arm: plain}
  mine: {}
  slow: {local: {optimizer: {lr: 0.01}}}
  loose: {privacy: {target_epsilon: 20}}
"""


def test_overrides_are_of_the_base_and_a_variant_has_the_last_word(directory: Path) -> None:
    (directory / "compare.yaml").write_text(ARMS)
    given = [
        "federation.rounds=3",
        "local.optimizer={name: sgd, lr: 2}",
        "privacy.target_epsilon=1",
    ]
    loaded = load_comparison(directory / "compare.yaml", overrides=given)

    def settings(comparison: LoadedComparison) -> list[tuple[object, ...]]:
        return [
            (e.federation.rounds, e.local.optimizer.lr, e.privacy and e.privacy.target_epsilon)
            for e in (variant.experiment for variant in comparison.variants)
        ]

    assert settings(loaded) == [(3, 2, None), (3, 2, 1), (3, 0.01, 1), (3, 2, 20)]
    write_settings(loaded, directory / "again.yaml")  # what `try: ... --tune` reads
    assert settings(load_comparison(directory / "again.yaml")) == settings(loaded)


@pytest.mark.parametrize("off", ["privacy=off", "privacy=null"])
def test_a_base_without_privacy_has_no_private_arm(directory: Path, off: str) -> None:
    (directory / "compare.yaml").write_text(ARMS.replace("  loose", "  # loose"))
    loaded = load_comparison(directory / "compare.yaml", overrides=[off])
    assert all(variant.experiment.not_private for variant in loaded.variants)


def test_a_mistaken_override_is_said_once_and_as_it_was_given(directory: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_comparison(directory / "compare.yaml", overrides=["federation.round=3", "seed=4"])
    assert str(caught.value).splitlines() == [
        "command line: seed: every variant runs with every seed; use --seeds",
        "command line: federation.round: unknown key; did you mean 'rounds'?",
    ]
