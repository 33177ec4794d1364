"""Packages that load names when they are first used list them before they are loaded."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["fedsim", "fedsim.clients", "fedsim.data", "fedsim.models"])
def test_dir_lists_public_names_before_they_are_loaded(name: str) -> None:
    program = (
        f"import sys, {name} as package\n"
        "names = dir(package)\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(package.__all__) <= set(names), names\n"
        "assert names == sorted(set(names))\n"
        "assert all(hasattr(package, public) for public in package.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
