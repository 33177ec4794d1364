"""Imports without garbage collection leave the collector as it was, also after an error."""

import gc
import subprocess
import sys

import pytest

from fedsim.core.commands import quick_imports


def fail_to_import() -> None:
    with quick_imports():
        assert not gc.isenabled()
        raise ImportError


def test_the_collector_is_back_after_an_error():
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError):
            fail_to_import()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


END = """
import atexit, gc
from fedsim.core.commands import quick_imports
atexit.register(lambda: print(len(gc.get_objects())))
with quick_imports():
    pass
kept = [[] for _ in range(10_000)]
"""


def test_the_end_of_a_program_searches_no_object_for_garbage():
    result = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 10_000
