"""`one_at_a_time`: each value of each key is a variant, all other keys as in the centre."""

from pathlib import Path

import pytest

from fedsim.cli import main
from fedsim.comparison.load import load_comparison
from fedsim.comparison.vary import load_varied
from fedsim.experiment import ExperimentError

FILE = """\
base: tiny.yaml
seeds: 2
baseline: dp
variants:
  dp:
    local.optimizer.lr: 1
    one_at_a_time:
      local.optimizer.lr: [0.5, 1, 2]
      local.batch_size: [16, 32]
      privacy.clipping: [flat, per_layer]
"""


def load(directory: Path, text: str = FILE) -> dict[str, dict[str, object]]:
    (directory / "c.yaml").write_text(text)
    return {one.name: one.settings for one in load_comparison(directory / "c.yaml").variants}


def test_one_key_differs_and_the_centre_stands_for_its_own_values(directory: Path) -> None:
    found = load(directory)
    # lr = 1 is the centre's, a batch of 32 that of tiny.yaml, and flat the schema's.
    names = ["dp", "dp-lr=0.5", "dp-lr=2", "dp-batch_size=16", "dp-clipping=per_layer"]
    assert list(found) == names
    for name, key in zip(
        names[1:],
        ["local.optimizer.lr"] * 2 + ["local.batch_size", "privacy.clipping"],
        strict=True,
    ):
        assert [k for k, v in found[name].items() if v != found["dp"][k]] == [key]


def test_a_repeated_value_is_no_baseline(directory: Path) -> None:
    with pytest.raises(ExperimentError, match="no variant 'dp-lr=1'"):
        load(directory, FILE.replace("baseline: dp", "baseline: dp-lr=1"))


def test_mistakes_have_their_place(directory: Path) -> None:
    grid = FILE.replace("    one_at_a_time:", "    grid: {local.steps: [1, 2]}\n    one_at_a_time:")
    with pytest.raises(ExperimentError, match=r"c\.yaml:8:5: .*grid and one_at_a_time exclude"):
        load(directory, grid)
    with pytest.raises(ExperimentError, match=r"c\.yaml:9:7: .*one_at_a_time.*must be a list"):
        load(directory, FILE.replace("[16, 32]", "16"))
    with pytest.raises(ExperimentError, match=r"c\.yaml:9:.*batch_size.*must be"):
        load(directory, FILE.replace("[16, 32]", "[0, 32]"))


def test_vary_takes_one_key_at_a_time(directory: Path) -> None:
    vary = {"local.optimizer.lr": [0.5, 2], "local.batch_size": [16, 32]}
    loaded = load_varied(directory / "tiny.yaml", vary, one_at_a_time=True, changes={"seeds": 1})
    assert [one.name for one in loaded.variants] == ["base", "lr=2", "batch_size=16"]
    assert loaded.baseline == "base"


def test_the_option_needs_values(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setattr("sys.argv", ["fedsim", "compare", "compare.yaml", "--one-at-a-time"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--one-at-a-time needs --vary" in capsys.readouterr().err
