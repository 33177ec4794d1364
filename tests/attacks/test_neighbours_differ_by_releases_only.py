"""Neighbours differ in released values alone, and these by no more than the ledger is charged for.

`neighbours.py` runs two neighbouring data sets, `settings_space.py` has the settings. Every pair of
values that the file accepts is run, 300 experiments, by hand or in the second stage; the default
stage has one experiment for each cell. Each mutation puts one old mistake back and must be caught.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedsim.clients.gradients.example_randomness import ModelRandomness
from fedsim.clients.gradients.per_example import ClipBounds
from fedsim.clients.training import block

if TYPE_CHECKING:
    import neighbours
    import settings_space
else:

    def _beside(name: str) -> ModuleType:  # the tests are no package
        spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    neighbours, settings_space = _beside("neighbours"), _beside("settings_space")


CHOICES: list[dict[str, str]] = [
    {},
    {"adjacency": "add_remove", "noise": "secure"},
    {"adjacency": "replace_one", "sampling": "fixed_size", "faults": "straggler"},
    {"model": "dropout", "budgets": "target"},
    {"model": "dropout", "noise": "secure", "adjacency": "add_remove", "local": "views"},
    {"clipping": "adaptive", "weighting": "examples_over_noise", "participation": "buffered"},
    {"clipping": "per_layer", "algorithm": "fedadam", "secure sums": "quantized"},
    {"trust": "distributed", "weighting": "examples", "adjacency": "replace_one"},
    {"trust": "distributed", "unit": "client", "participation": "some", "local": "adam"},
    {"trust": "central", "budgets": "own", "personalization": "held out"},
    {"trust": "central", "unit": "client", "participation": "poisson", "clipping": "adaptive"},
    {"unit": "client", "adjacency": "replace_one", "local": "adam", "weighting": "noise alone"},
    {"release": "votes", "trust": "central", "unit": "client"},
    {"release": "output", "adjacency": "replace_one"},
    {"release": "input", "participation": "cyclic"},
    {"release": "slopes", "trust": "central"},
    {"correlation": "toeplitz", "sampling": "cyclic", "budgets": "automatic delta"},
    {"correlation": "blt", "trust": "central", "unit": "client", "participation": "turns"},
]


MORE: list[dict[str, str]] = [  # whose messages and records no choice above has
    {"secure sums": "additive", "faults": "straggler"},
    {"budgets": "withdraw", "faults": "error"},
    {"participation": "partial work"},
]
PAGE = Path(__file__).parents[2] / "docs" / "explain" / "what_is_public.md"


def run_choice(choice: Mapping[str, str], base: Path) -> "neighbours.Transcript | None":
    return neighbours.run_pair(settings_space.experiment_of(choice), base)


def name_of(choice: Mapping[str, str]) -> str:
    return ", ".join(choice.values()) or "plain"


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """Run a choice by number, once, and return what was drawn, and (message or file, key)."""
    base = tmp_path_factory.mktemp("pairs")

    @cache
    def run(number: int) -> Any:
        found = run_choice((CHOICES + MORE)[number], base / str(number))
        assert found is not None, "refused"
        return found, neighbours.facts_of(found, base / str(number) / "first" / "run")

    return run


@pytest.mark.parametrize("number", range(len(CHOICES)), ids=map(name_of, CHOICES))
def test_neighbours_are_told_apart_by_charged_releases_alone(
    number: int, seen_of: Callable[[int], Any]
) -> None:
    found, _ = seen_of(number)
    assert found.error is None
    assert max(found.moves) > 0.0, "the neighbours released the same"


def test_the_page_for_reviewers_has_a_row_for_everything_that_is_seen(
    seen_of: Callable[[int], Any],
) -> None:
    seen = set[tuple[str, str]]()
    for number in range(len(CHOICES + MORE)):
        seen |= seen_of(number)[1]
    listed = set[tuple[str, str]]()
    for line in PAGE.read_text().splitlines():
        place, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"`[\w.]+`", place) and len(cells) == 2 and place != "`server`":
            keys = re.findall(r"`(\w+)`", cells[0]) or [""]
            listed |= {(place.strip("`"), key) for key in keys}
    assert seen - listed == set()
    assert listed - seen == set()


# --- Old mistakes ---------------------------------------------------------------------------------


def test_mutation_a_client_less_changes_the_draws_of_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"trust": "central", "unit": "client", "adjacency": "add_remove"}
    for number, more in enumerate(({"participation": "poisson"}, {"budgets": "own"})):
        assert run_choice(choice | more, tmp_path / f"refused{number}") is None
        with monkeypatch.context() as patch:
            patch.setattr("fedsim.experiment.rules.trust.unmet", lambda choices: {})
            with pytest.raises(neighbours.ToldApartError, match="differs"):
                run_choice(choice | more, tmp_path / str(number))


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_mutation_masks_by_place_are_caught(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRandomness, "__enter__", lambda self: self)
    monkeypatch.setattr(ModelRandomness, "__exit__", lambda *_: None)
    monkeypatch.setattr(block, "generator_state", lambda _: torch.zeros(1))
    with pytest.raises(neighbours.ToldApartError, match="of what is charged"):
        run_choice({"model": "dropout", "noise": noise}, tmp_path)


def test_mutation_a_plain_digest_of_examples_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(arrays: Iterable[np.ndarray]) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

    monkeypatch.setattr("fedsim.runs.inputs.private_digest", plain)
    with pytest.raises(neighbours.ToldApartError, match=r"manifest\.json differs"):
        run_choice({}, tmp_path)


@pytest.mark.parametrize("trust", ["local", "distributed", "central"])
def test_mutation_a_bound_that_is_too_large_by_a_hundredth_is_caught(
    trust: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.runs.runner.probe_mechanisms", lambda _: None)
    scale = ClipBounds.__init__

    def larger(self: Any, clipping: Any, members: Any, bounds: Any, scales: Any) -> None:
        scale(self, clipping, members, bounds, scales * 1.01)

    monkeypatch.setattr(ClipBounds, "__init__", larger)
    with pytest.raises(neighbours.ToldApartError, match="of what is charged"):
        run_choice({"trust": trust, "weighting": "examples"}, tmp_path)


@pytest.mark.parametrize(
    ("most", "least_ran", "least_pairs"),
    [
        pytest.param(12, 8, 0, marks=pytest.mark.slow),
        pytest.param(None, 250, 2400, marks=pytest.mark.long),
    ],
)
def test_every_pair_of_settings_keeps_neighbours_together(
    tmp_path: Path, most: int | None, least_ran: int, least_pairs: int
) -> None:
    """Every pair by hand, which takes ten minutes, and twelve experiments before each change."""
    base = tmp_path / "plugins"
    neighbours.Dataset.make((3,) * 5).write(base)
    choices, pairs = settings_space.covering_array(base, most=most)
    apart, ran = dict[str, str](), 0
    for number, choice in enumerate(choices):
        try:
            found = run_choice(choice, tmp_path / str(number))
            ran += found is not None and bool(found.before)
        except neighbours.ToldApartError as error:
            apart[name_of(choice)] = str(error)
    print(f"{len(choices)} experiments, {ran} with releases, {len(pairs)} pairs of values")  # noqa: T201
    assert not apart
    assert ran >= least_ran
    assert len(pairs) >= least_pairs
