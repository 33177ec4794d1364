"""CONTRIBUTING.md lists the files that a built-in touches: all of them, and no others."""

import re
from pathlib import Path
from typing import get_args

import pytest
from torch import nn

from fedsim.clients.gradients import layers
from fedsim.clients.sampling.divided_batches import SAMPLINGS
from fedsim.clients.sampling.schemes import SamplingName
from fedsim.data.catalog import DATASETS
from fedsim.data.sources import LOADERS
from fedsim.simulation.engines import engine_for
from fedsim.simulation.settings import RuntimeSettings

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
ROOMS = ("fedsim", "clients", "server", "accountant")
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")

# A built-in of each kind: what names it in the source, and what names it in documents.
EXAMPLES = {
    "A strategy": (r'"fedadam"|\bFedAdam\b', "fedadam"),
    "A kind of private release": (
        r'"input_perturbation"|\bInputMechanism\b',
        "input_perturbation",
    ),
    "A sampler": (r'"balls_and_bins"|\bBallsAndBins\b', "balls_and_bins"),
    "A layer rule": (r"\bEmbeddingUse\b|\bembedding_rule\b", "EmbeddingUse"),
    "A dataset": (r'"blobs": |\bBlobsArgs\b', "blobs"),
    "An engine": (r'"flower"', "flower"),
    "A file of figures": (r'"answers\.json"|\banswers_context\b', "answers.json"),
    "A column of clients": (r'"group": client_privacy|ClientColumn\("group"', "group"),
}


def sections() -> dict[str, str]:
    parts = PAGE.read_text().split("\n### ")[1:]
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}


def listed(kind: str) -> list[str]:
    return re.findall(r"^\| `([\w/]+\.\w+)` \|", sections()[kind], re.M)


def test_every_kind_has_its_list() -> None:
    assert set(sections()) == set(EXAMPLES)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_list_has_every_file_that_names_a_built_in_of_its_kind(kind: str) -> None:
    pattern, name = EXAMPLES[kind]
    files = listed(kind)
    assert [path for path in files if not (ROOT / path).is_file()] == []
    sources = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    assert sources == {path for path in files if path.startswith(ROOMS)}
    others = [path for path in files if not path.startswith(ROOMS)]
    assert len([path for path in others if path.startswith("tests/")]) == 1
    assert [path for path in others if name not in (ROOT / path).read_text()] == []


@pytest.mark.parametrize("kind", EXAMPLES)
def test_names_of_the_code_in_the_list_exist(kind: str) -> None:
    for path, what in re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", sections()[kind], re.M):
        for name in re.findall(r"`([\w.]+)`", what):
            assert name.rsplit(".", 1)[-1] in (ROOT / path).read_text(), f"{path}: {name}"


def test_the_registries_agree() -> None:
    assert set(SAMPLINGS) == set(get_args(SamplingName))
    assert set(LOADERS) == set(DATASETS)
    assert nn.Embedding in layers.RULES
    for name in get_args(RuntimeSettings.model_fields["engine"].annotation):
        assert engine_for(RuntimeSettings(engine=name)).__class__.__name__.lower().startswith(name)
