"""Catalogues import what is chosen, and every place in them is right."""

import subprocess
import sys

import pytest

from fedsim.algorithms.algorithm import algorithms
from fedsim.cli import cli
from fedsim.core.commands import ByName
from fedsim.data.sources import LOADERS
from fedsim.tracking.trackers import TRACKERS


def test_looking_one_up_imports_it_and_no_other() -> None:
    code = (
        "import sys\n"
        "from fedsim.core.commands import ByName\n"
        "known = ByName({'a': 'colorsys:rgb_to_hsv', 'b': 'sndhdr:what'})\n"
        "assert 'a' in known and list(known) == ['a', 'b'] and 'colorsys' not in sys.modules\n"
        "known['a']\n"
        "assert 'colorsys' in sys.modules and 'sndhdr' not in sys.modules\n"
        "assert known.get('c') is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("catalogue", [LOADERS, TRACKERS, cli.commands, algorithms()])
def test_every_place_is_right(catalogue: ByName[object]) -> None:
    for name, found in catalogue.items():
        assert callable(found), name
