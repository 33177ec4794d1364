"""Packages that load names when they are first used list them before they are loaded."""

import subprocess
import sys

PROGRAM = """
import sys
import fedsim, fedsim.clients, fedsim.data
packages = [fedsim, fedsim.clients, fedsim.data]
for package in packages:
    names = dir(package)
    assert 'torch' not in sys.modules, package
    assert set(package.__all__) <= set(names), names
    assert names == sorted(set(names))
for package in packages:
    assert all(hasattr(package, public) for public in package.__all__)
"""


def test_dir_lists_public_names_before_they_are_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
