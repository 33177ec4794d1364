"""Packages that load names when they are first used list them before they are loaded."""

import subprocess
import sys

import fedsim
import fedsim.clients
import fedsim.data

PROGRAM = """
import sys
import fedsim, fedsim.clients, fedsim.data
for package in (fedsim, fedsim.clients, fedsim.data):
    names = dir(package)
    assert 'torch' not in sys.modules, package
    assert set(package.__all__) <= set(names), names
    assert names == sorted(set(names))
"""


def test_dir_lists_public_names_before_they_are_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_every_public_name_can_be_loaded() -> None:
    for package in (fedsim, fedsim.clients, fedsim.data):
        assert all(hasattr(package, name) for name in package.__all__)
