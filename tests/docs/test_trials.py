"""docs/decisions/names.md walks through folders that exist and ends at code that exists."""

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "decisions" / "names.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")


def test_every_walk_lists_each_folder_and_ends_in_the_next() -> None:
    walks = PAGE.read_text().split("\n### ")[1:]
    assert len(walks) == 3
    for walk in walks:
        steps = re.findall(r"^\| `ls ?([\w/]*)` \| (.*) \|$", walk, re.M)
        assert 2 <= len(steps) <= 3
        for (_, chosen), (listed, _) in itertools.pairwise(steps):
            assert f"`{listed}`" in chosen


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("fedsim/algorithms/built_in/fedadam.py", "class FedAdam"),
        ("server/train_round.py", "class TrainRound"),
        ("fedsim/noise/sources.py", "def fill_"),
        ("clients/mechanisms/dp_sgd/mechanism.py", "class DpSgdMechanism"),
    ],
)
def test_the_code_is_in_the_file_found(path: str, name: str) -> None:
    assert name in (ROOT / path).read_text()
    assert path in PAGE.read_text()
