"""Every command of the README runs, and every figure in it is what the run prints."""

import csv
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from fedsim.cli import cli
from fedsim.comparison.statistics import Estimate, holm, paired_difference, t_interval
from fedsim.comparison.text import difference_text, interval_text, p_text
from fedsim.core.formatting import epsilon_text

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
RECORDED = ROOT / "tests" / "comparison" / "compare_hospitals.csv"
PICTURE = ROOT / "docs" / "start" / "epsilon_accuracy.svg"
pytestmark = pytest.mark.skipif(not README.exists(), reason="reads the documents of a checkout")

Blocks = Callable[[Path], Iterator[tuple[str, str]]]
Differs = Callable[[str, str], str | None]


class Terminal(Protocol):
    code: int

    def __call__(self, command: str) -> str: ...


# What FILE, RUN and DIR in the README's table stand for here; runs are short, and in this order.
COMMANDS = {
    "init": "fedsim init new",
    "run": "fedsim run experiments/digits_dp.yaml privacy=null seed=1 federation.rounds=1 --out r",
    "run --resume": "fedsim run experiments/digits_dp.yaml privacy=null seed=1 federation.rounds=2"
    " --out r --resume",
    "plan": "fedsim plan experiments/digits_dp.yaml",
    "curve": "fedsim curve experiments/digits_dp.yaml",
    "validate": "fedsim validate experiments/digits_dp.yaml",
    "report": "fedsim report r",
    "predict": "fedsim predict r new.npz",
    "verify": "fedsim verify r",
    "totals": "fedsim totals events.json --delta 1e-5",
    "audit": "fedsim audit experiments/digits_dp.yaml --clients 1 --steps 20",
    "deploy": "fedsim deploy experiments/digits_dp.yaml --out app",
    "node-policy": "fedsim node-policy policy.yaml",
    "client-key": "fedsim client-key client.key",
    "helper-key": "fedsim helper-key helper.key",
    "list": "fedsim list",
    "schema": "fedsim schema",
}


def test_the_first_command_ends_as_shown(
    terminal: Terminal, blocks_of: Blocks, differs: Differs
) -> None:
    blocks = list(blocks_of(README))
    command = blocks[0][1].rsplit("/bin/", 1)[1].strip()
    (shown,) = [text for language, text in blocks if not language and "every client" in text]
    printed = terminal(f"{command} --out r")
    assert differs(f"...\n{shown}...\n", printed) is None, printed
    assert "report.html" in printed


def test_every_command_of_the_table_works(terminal: Terminal) -> None:
    cells = re.findall(r"^\| (`fedsim [^|]*) \|", README.read_text(), re.MULTILINE)
    rows = re.findall(r"`fedsim ([\w-]+)([^`]*)`", " ".join(cells))
    names = [f"{name} --resume" if "--resume" in rest else name for name, rest in rows]
    assert sorted(names) == sorted({*COMMANDS, "compare"})
    assert {name.split()[0] for name in names} == set(cli.commands)
    Path("events.json").write_text('[{"type": "Gaussian", "noise_multiplier": 1.0}]')
    np.savez("new.npz", x=np.zeros((2, 1, 8, 8)))
    for name, command in COMMANDS.items():
        printed = terminal(command)
        assert terminal.code == 0, f"{name}: {printed}"
        assert printed
    assert (Path("app") / "pyproject.toml").exists()


def test_the_own_model_runs(terminal: Terminal) -> None:
    printed = terminal("fedsim run experiments/custom_model.yaml federation.rounds=1 --out r")
    assert "custom-model: completed after 1 round in" in printed
    (spent,) = re.findall(r"every client within ε = (\S+)", printed)
    assert float(spent) <= 6.0


def test_mistakes_are_shown_as_in_the_readme(
    terminal: Terminal, blocks_of: Blocks, differs: Differs
) -> None:
    (block,) = [text for _, text in blocks_of(README) if text.startswith("$ fedsim validate")]
    command, shown = block.removeprefix("$ ").split("\n", 1)
    Path("exp.yaml").write_text(
        "name: x\n"
        "data:\n"
        "  dataset: digits\n"
        "  partition: {scheme: iid, num_clients: 2}\n"
        "model:\n"
        "  name: mlp\n"
        "local: {steps: 1, batch_size: 8}\n"
        "federation:\n"
        "  round: 3\n"
        "privacy:\n"
        "  target_epsilon: 1.0\n"
        "  delta: 1.0e-3\n"
        "  max_grad_norm: -1\n"
    )
    assert differs(shown, terminal(command)) is None


def recorded() -> dict[str, list[dict[str, str]]]:
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: [row for row in rows if row["variant"] == name]
        for name in dict.fromkeys(row["variant"] for row in rows)
    }


METRIC = "test_group_accuracy"
SHOWN = ("plain", "local-1", "distributed-0.1", "alone-0.1")
LINES = {  # points of the picture: their variants, from the smallest ε to no privacy
    "only sums are seen": ("distributed-0.1", "distributed-0.3", "distributed-1", "plain"),
    "each hospital's own noise": ("local-0.1", "local-0.3", "local-1", "plain"),
    "each hospital alone": ("alone-0.1", "alone-0.3", "alone-1", "alone-plain"),
}


def accuracies() -> dict[str, list[float]]:
    return {name: [float(row[METRIC]) for row in rows] for name, rows in recorded().items()}


def test_the_table_of_the_comparison_is_computed_from_the_recorded_runs() -> None:
    values = accuracies()
    private = [name for name in values if name != "plain"]
    differences = {name: paired_difference(values[name], values["plain"]) for name in private}
    adjusted = holm([differences[name].t_p for name in private])
    p_values = dict(zip(private, adjusted, strict=True))
    shown = {
        line.split()[0]: " ".join(line.split())
        for line in README.read_text().splitlines()
        if line.startswith(" ") and line.split()[0] in values
    }
    assert set(shown) == set(SHOWN)
    for name, line in shown.items():
        assert interval_text(METRIC, t_interval(values[name])) in line
        if name != "plain":
            difference = difference_text(METRIC, differences[name].estimate)
            epsilon = epsilon_text(max(float(row["epsilon"]) for row in recorded()[name]))
            assert f"{difference} {p_text(p_values[name])}" in line
            assert f" ε ≤ {epsilon}, " in line


def test_the_picture_shows_the_means_of_the_recorded_runs() -> None:
    """With WRITE_DOCS=1 in the environment the picture is drawn again."""
    estimates = {name: t_interval(values) for name, values in accuracies().items()}
    if os.environ.get("WRITE_DOCS") == "1":
        draw(estimates)
    means = {name: 100 * estimate.mean for name, estimate in estimates.items()}
    text = PICTURE.read_text(encoding="utf-8")
    for line, variants in LINES.items():
        assert f">{line}<" in text
        assert all(f">{means[name]:.1f}<" in text for name in variants)
    readme = README.read_text(encoding="utf-8")
    assert f"{means['local-1']:.1f} % at ε = 1, {means['plain']:.1f} % without" in readme


def draw(estimates: Mapping[str, Estimate]) -> None:
    figure = Figure(figsize=(6.8, 2.8), layout="constrained")
    axes = figure.subplots()
    looks = zip(("#1f6f8b", "#c8553d", "#7a7a7a"), "os^", strict=True)
    for place, (line, (color, marker)) in enumerate(zip(LINES, looks, strict=True)):
        shown = [estimates[name] for name in LINES[line]]
        means = [100 * estimate.mean for estimate in shown]
        half = [100 * ((estimate.high or estimate.mean) - estimate.mean) for estimate in shown]
        positions = [group + 0.24 * (place - 1) for group in range(len(shown))]
        axes.errorbar(positions, means, half, fmt=marker, color=color, capsize=3, label=line)
        for x, mean, above in zip(positions, means, half, strict=True):
            axes.text(x, mean + above + 0.4, f"{mean:.1f}", ha="center", fontsize=8)
    axes.set_xticks(range(4), ["ε ≤ 0.1", "ε ≤ 0.3", "ε ≤ 1", "no privacy"])
    axes.set_ylim(68, 87)
    axes.set_ylabel("mean accuracy of\nfour hospitals, %")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    axes.spines[["top", "right"]].set_visible(False)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "readme"}):
        figure.savefig(PICTURE, format="svg", metadata={"Date": None}, facecolor="white")


@pytest.mark.parametrize(
    "names",
    [pytest.param(SHOWN, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.long)],
)
def test_the_recorded_runs_are_those_of_the_shipped_comparison(
    names: tuple[str, ...] | None, terminal: Terminal
) -> None:
    """Those that the README shows, and all of them."""
    content = yaml.safe_load((ROOT / "experiments" / "compare_hospitals.yaml").read_text())
    assert content["seeds"] == 20
    variants = {name: content["variants"][name] for name in names or content["variants"]}
    content |= {"base": f"experiments/{content['base']}", "seeds": [0], "variants": variants}
    Path("compare.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    printed = terminal("fedsim compare compare.yaml --out c --quiet")
    assert terminal.code == 0, printed
    with Path("c/comparison.csv").open() as file:
        found = {row["variant"]: row for row in csv.DictReader(file)}
    assert set(found) == set(names or recorded())
    for name in found:
        (row,) = [row for row in recorded()[name] if row["seed"] == "0"]
        # A patient of the smallest hospital counts for 2 points: processors add in other orders.
        assert float(found[name][METRIC]) == pytest.approx(float(row[METRIC]), abs=0.03)
        if row["epsilon"]:
            assert float(found[name]["epsilon"]) == pytest.approx(float(row["epsilon"]), rel=1e-6)
